"""Everything a plan depends on, by name and digest, so that drift can name what changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import blake3

import dz
from dz.adapt.recipes import Chain
from dz.core import jsonio
from dz.core.headers import TensorInfo
from dz.core.inventory import Inventory
from dz.core.registry import Registry
from dz.core.source import Source
from dz.shipped import outside

_PACKAGE = Path(dz.__file__).resolve().parent
# folders whose code shapes a plan
_DECIDES = ("core", "ops", "weights", "backends", "inspect", "swap", "verify", "adapt", "upstream")


def digest(data: bytes | str) -> str:
    """The first 16 hex digits of blake3."""
    return blake3.blake3(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def of_value(value: Any) -> str:
    """A digest of plain data, whatever the order of its keys."""
    return digest(json.dumps(jsonio.to_builtins(value), sort_keys=True))


def of_files(paths: Iterable[Path]) -> str:
    """A digest over files by folder, name and content."""
    return digest("".join(f"{p.parent.name}/{p.name}:{digest(p.read_bytes())}\n" for p in sorted(paths)))


def of_inventory(inventory: Inventory) -> str:
    """A digest of what an inventory says about the model."""
    return of_value(inventory)


def inputs(
    source: Source,
    headers: Mapping[str, TensorInfo],
    *,
    trust: bool,
    device: str,
    here: bool,
    dtype: str,
    chain: Chain,
    sets: Iterable[str],
    verify: bool,
    registry: Registry,
) -> dict[str, str]:
    """The inputs that need no model to be built. `here` says whether kernels can be run on the device."""
    config = source.path / "config.json"
    tensors = sorted((n, i.dtype, i.shape) for n, i in headers.items())
    out = {
        "rev8": source.rev8,
        "config": digest(config.read_bytes()) if config.is_file() else "",
        "code": digest(source.code_hash) if trust and source.code_hash else "not run",
        "headers": of_value(tensors),
        "device": device,
        "verified on the device": "yes" if verify and here else "no",
        "dtype": dtype,
        "recipe": chain.name,
        "recipe named": chain.named,
        "set": "; ".join(sets),
        "dz": f"{dz.__version__} {_own_code()}",
    }
    out |= {f"recipe {r.name}": digest(Path(r.path).read_bytes()) for r in chain.recipes}
    out |= {f"version of {n}": _version(n) for n in ("torch", "transformers", "triton")}
    out |= {f"op {p.stem}": digest(p.read_bytes()) for f in outside("ops") for p in sorted(f.glob("*.py"))}
    return out | {f"kernel {k}": _kernel(registry, k) for k in sorted(registry.kernels)}


def plan_hash(values: Mapping[str, str]) -> str:
    """The hash of all inputs."""
    return of_value(dict(values))


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Each input that differs, in words."""
    out = []
    for name in sorted({*before, *now} - {"inventory"}):
        a, b = before.get(name), now.get(name)
        if a != b:
            out.append(f"{name} is new" if a is None else f"{name} is gone" if b is None else f"{name}: {a} -> {b}")
    return out


def _own_code() -> str:
    return of_files(p for f in _DECIDES for p in (_PACKAGE / f).rglob("*.py"))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _kernel(registry: Registry, key: str) -> str:
    """The digest of the kernel's folder (its file, its neighbours', what was tuned) and of what all kernels share."""
    file = getattr(sys.modules.get(registry.kernels[key].run.__module__), "__file__", None)
    if not file:
        return "no file"
    own = Path(file).parent
    return of_files(p for f in (own, own.parent / "common") for kind in ("*.py", "*.json") for p in f.glob(kind))
