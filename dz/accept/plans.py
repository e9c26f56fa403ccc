"""Which plan the served model follows: that of the workspace, or one kept apart for another dtype.

A plan holds for one dtype. Were the plan for verification written over the workspace's, the next `dz serve` would have
to make its own again, and `dz serve --frozen` would refuse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dz.core import jsonio
from dz.core.plan import Plan
from dz.core.protocols import Progress
from dz.core.workspace import Workspace
from dz.errors import DzError
from dz.hub.lock import Lock
from dz.settings import Settings, Value

UNKNOWN = "unknown"
WISHES = ("recipe named", "set")  # inputs of a plan that a person chose


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`settings` are those for the plan and the server; `space` is where the plan and the inventory lie."""

    settings: Settings
    space: Workspace

    @property
    def root(self) -> Path:
        """The root that the server is given as its workspace."""
        return self.space.folder.parent


def place(settings: Settings, lock: Lock, space: Workspace) -> Place:
    """Where the plan of a server that is started here lies. A dtype that only this command names, and that is not the
    checkpoint's own, has a workspace of its own inside `space`, with the same lock and the same wishes."""
    dtype = next(v for v in settings.values() if v.name == "dtype")
    if dtype.value == "auto" or dtype.origin != "flag":
        return Place(settings=settings, space=space)
    if dtype.value == _top(_config(lock)):
        return Place(settings=_with(settings, "dtype", "auto"), space=space)
    root = space.folder / f"verify-{dtype.value}"
    apart = Workspace.of(lock.source, root)
    _carry(space, apart)
    return Place(settings=_with(settings, "workspace", str(root)), space=apart)


def current(where: Place, lock: Lock, *, trust: bool, progress: Progress) -> tuple[str, str]:
    """(dtype, hash) of the plan in force, which is made if need be; (UNKNOWN, "") when it cannot be made, which is the
    load check's to tell."""
    from dz import adapt

    device = where.settings.get("device")
    try:
        plan: Plan = adapt.current_plan(
            lock.source, trust=trust, device=device, settings=where.settings, progress=progress
        )
    except DzError as e:
        progress.note(f"no plan: {e.what}: {e.why}")
        return UNKNOWN, ""
    return plan.dtype, plan.hash


def stated_dtype(lock: Lock) -> str:
    """The dtype that the configuration names, of the model or of its text part; float32 where it names none."""
    config = _config(lock)
    parts = [v for k, v in config.items() if k.endswith("text_config") and isinstance(v, dict)]
    return next((d for d in map(_top, [config, *parts]) if d), "float32")


def _config(lock: Lock) -> dict[str, Any]:
    path = lock.source.path / "config.json"
    return jsonio.read(path) if path.is_file() else {}


def _top(config: dict[str, Any]) -> str:
    found = (config.get(k) for k in ("dtype", "torch_dtype"))
    return next((v for v in found if isinstance(v, str)), "")


def _with(settings: Settings, name: str, value: str) -> Settings:
    return Settings({v.name: v for v in settings.values()} | {name: Value(name, value, "flag")})


def _carry(space: Workspace, apart: Workspace) -> None:
    """The lock, and the workspace's plan where its wishes differ: its dtype differs too, so that it is made anew, with
    these wishes."""
    if space.fetch.is_file():
        jsonio.write_text(apart.fetch, space.fetch.read_text("utf-8"))
    if _wishes(space.plan) == _wishes(apart.plan):
        return
    if space.plan.is_file():
        jsonio.write_text(apart.plan, space.plan.read_text("utf-8"))
    else:
        apart.plan.unlink(missing_ok=True)


def _wishes(path: Path) -> list[str]:
    from dz.adapt.current import read_plan

    plan = read_plan(path)
    return [plan.inputs.get(name, "") if plan else "" for name in WISHES]
