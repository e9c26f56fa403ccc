"""What `dz doctor` looks at. Each function gives the lines of one subject; none writes, none raises for a finding."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from dz.cli.progress import size
from dz.settings import Settings

GB = 10**9
ROOM = 20 * GB  # below this much free disk a current model does not fit beside itself
TIMEOUT = 3.0  # seconds to wait for the hub


@dataclass(frozen=True, slots=True)
class Line:
    """One finding. `next` is what to do about it, empty when nothing is."""

    item: str
    status: Literal["ok", "warn", "fail"]
    found: str
    next: str = ""


def examine(settings: Settings) -> list[Line]:
    """Every finding, in the order to read them."""
    out = [Line("python", "ok", f"{platform.python_version()} at {sys.executable}")]
    out += packages()
    if all(line.status == "ok" for line in out if line.item == "torch"):
        out += devices()
        out += registry()
        out += vision()
    out += outside()
    out += disks(Path(settings.get("workspace")))
    out += hub(settings.get("hf_endpoint"))
    return out


def requirements() -> list[str]:
    """Names of the packages dz cannot do without here, from its metadata or, in a bare checkout, pyproject.toml."""
    try:
        rows = metadata.requires("dz") or []
    except metadata.PackageNotFoundError:
        file = Path(__file__).resolve().parents[2] / "pyproject.toml"
        rows = tomllib.loads(file.read_text("utf-8"))["project"]["dependencies"]
    kept = [r for r in rows if "extra ==" not in r and (sys.platform == "linux" or "sys_platform" not in r)]
    return [found[0] for r in kept if (found := re.match(r"[A-Za-z0-9._-]+", r))]


def packages() -> Iterator[Line]:
    """One line for each package that is missing, and one that gives the versions of the others."""
    have: dict[str, str] = {}
    for name in requirements():
        try:
            have[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Line(name, "fail", "not installed", f"pip install {name}")
    for name in ("torch", "triton", "transformers"):
        if name in have:
            yield Line(name, "ok", have.pop(name))
    yield Line("packages", "ok", ", ".join(f"{k} {v}" for k, v in have.items()))


def devices() -> Iterator[Line]:
    """The device that `auto` means, every other kind that is here, and the host's memory."""
    from dz import backends
    from dz.backends.cpu import BACKEND, Host

    seen = [kind for kind in backends.ORDER if backends.backend(kind).count()]
    for kind in seen:
        device = backends.detect(kind)
        free, total = backends.memory(device)
        number = f" x{backends.backend(kind).count()}" if backends.backend(kind).count() > 1 else ""
        known = f", {device.bandwidth / 1e12:.1f} TB/s" if device.bandwidth else ""
        found = f"{device.spec}, {device.name}{number}, {size(free)} of {size(total)} free{known}"
        yield Line("device" if kind == seen[0] else f"device {kind}", "ok", found)
    if isinstance(BACKEND, Host):
        yield Line("processors", "ok", f"{BACKEND.processors()} for this process")
    if seen[0] != "cpu" and not any(shutil.which(c) for c in ("cc", "gcc", "clang")):
        yield Line("compiler", "warn", "no C compiler: Triton cannot start kernels", "install gcc or clang")


def registry() -> Iterator[Line]:
    """How many ops and kernels there are, and each kernel that cannot be loaded, with the reason."""
    from dz.core.registry import Registry

    found = Registry.discover()
    yield Line("ops", "ok" if found.ops else "fail", str(len(found.ops)), "" if found.ops else "install dz again")
    usable = f"{len(found.kernels)} usable, {len(found.unavailable)} unavailable"
    yield Line("kernels", "ok" if found.kernels else "warn", usable)
    for key, why in sorted(found.unavailable.items()):
        yield Line(f"kernel {key}", "warn", why, "install what it imports, or leave it: it is never chosen")


def outside() -> Iterator[Line]:
    """The folders of $DZ_PATH; one that is not there is passed over everywhere else, so it is said here."""
    for text in filter(None, os.environ.get("DZ_PATH", "").split(os.pathsep)):
        kinds = [kind for kind in ("ops", "kernels", "recipes", "checklists") if (Path(text) / kind).is_dir()]
        if kinds:
            yield Line("DZ_PATH", "ok", f"{text}: {', '.join(kinds)}")
        else:
            yield Line("DZ_PATH", "warn", f"{text} has no ops, kernels, recipes or checklists", "mend DZ_PATH")


def vision() -> Iterator[Line]:
    """Whether torchvision, which many image processors import, is there and fits the torch that is installed."""
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        then = "python -m pip install torchvision (the build that matches your torch)"
        yield Line("torchvision", "warn", "not installed; some image processors need it", then)
        return
    try:
        import torchvision  # noqa: F401  importing it is the test: a build for another torch fails here
    except Exception as e:  # noqa: BLE001  a mismatched binary fails in many ways, and each of them is the finding
        fix = "install the torchvision made for this torch"
        yield Line("torchvision", "warn", f"{version} does not load: {type(e).__name__}: {e}", fix)
        return
    yield Line("torchvision", "ok", version)


def disks(workspace: Path) -> Iterator[Line]:
    """Free space of the hub's cache and of the workspace, and whether they can be written."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        cache = Path.home() / ".cache/huggingface/hub"
    else:
        cache = Path(HF_HUB_CACHE)
    for item, path, needed in (("cache", cache, ROOM), ("workspace", workspace.absolute(), GB)):
        parent = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(parent).free
        found = f"{path}, {size(free)} free"
        variable = "HF_HOME" if item == "cache" else "DZ_WORKSPACE"
        if not os.access(parent, os.W_OK):
            yield Line(item, "fail", f"{found}, but {parent} cannot be written", f"set {variable} to a folder of yours")
        elif free < needed:
            yield Line(item, "warn", found, f"set {variable} to a larger disk")
        else:
            yield Line(item, "ok", found)


def hub(endpoint: str) -> Iterator[Line]:
    """Whether the hub answers; not asked when HF_HUB_OFFLINE is set."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        yield Line("hub", "ok", f"{endpoint}, not asked: HF_HUB_OFFLINE is set")
        return
    try:
        import httpx

        status = httpx.head(endpoint, timeout=TIMEOUT, follow_redirects=True).status_code
    except ImportError:
        return  # said among the packages
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        fix = "set HF_ENDPOINT to a mirror that answers, or work from folders on disk"
        yield Line("hub", "warn", f"{endpoint} does not answer: {type(e).__name__}", fix)
        return
    yield Line("hub", "ok" if status < 500 else "warn", f"{endpoint} answers ({status})")
