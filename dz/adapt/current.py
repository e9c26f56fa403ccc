"""The plan in force for a source: the one on disk if nothing it depends on has changed, else a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dz.adapt import digests
from dz.adapt.make import basis, build
from dz.core import jsonio
from dz.core.envelope import envelope, validate
from dz.core.inventory import Inventory
from dz.core.plan import Plan
from dz.core.protocols import Progress, Silent
from dz.core.registry import Registry
from dz.core.source import Source
from dz.core.workspace import Workspace
from dz.errors import Refused
from dz.settings import Settings


@dataclass(frozen=True, slots=True)
class Drift:
    """`changed` names each input that differs; empty: the plan is current. `plan` is None when there is none."""

    plan: Plan | None
    changed: tuple[str, ...]


def read_plan(path: Path) -> Plan | None:
    """The plan document at `path`; None when there is none. Raises UsageError when it is not a plan."""
    if not path.is_file():
        return None
    document = jsonio.read(path)
    data = document.get("data") if isinstance(document, dict) else None
    return jsonio.from_builtins(Plan, data, where=str(path))


def drift(
    source: Source,
    *,
    trust: bool,
    device: str,
    settings: Settings,
    recipe: str | None = None,
    sets: Sequence[str] | None = None,
    verify: bool = True,
    registry: Registry | None = None,
) -> Drift:
    """What changed since the plan on disk was made. `recipe` and `sets` default to those that it was made with."""
    plan = read_plan(_place(source, settings).plan)
    if plan is None:
        return Drift(None, ("there is no plan",))
    named, given = _kept(plan, recipe, sets)
    now = basis(
        source,
        trust=trust,
        device=device,
        settings=settings,
        recipe=named,
        sets=given,
        verify=verify,
        registry=registry,
    )
    return Drift(plan, tuple(digests.changed(plan.inputs, now.inputs)))


def current_plan(
    source: Source,
    *,
    trust: bool,
    device: str,
    settings: Settings,
    recipe: str | None = None,
    sets: Sequence[str] | None = None,
    frozen: bool = False,
    progress: Progress | None = None,
    registry: Registry | None = None,
) -> Plan:
    """The plan for a source on a device. Without one, or when something it depends on changed, it is made and written,
    and that is said; `recipe` and `sets` default to those that the old one was made with. `frozen`: Refused instead,
    naming what changed."""
    say = progress or Silent()
    where: dict[str, Any] = {"trust": trust, "device": device, "settings": settings, "registry": registry}
    found = drift(source, recipe=recipe, sets=sets, **where)
    if found.plan is not None and not found.changed:
        return found.plan
    what = "; ".join(found.changed[:3])
    if frozen:
        raise Refused(f"{source.name} has no current plan", what, f"dz adapt {source.name}", code="drift")
    say.note(f"plan: made anew ({what})" if found.plan is not None else "plan: made, since there is none")
    named, given = _kept(found.plan, recipe, sets)
    base = basis(source, recipe=named, sets=given, **where)
    inventory, plan = build(base, trust=trust, verify=True, progress=say)
    write(source, settings, inventory, plan)
    return plan


def write(source: Source, settings: Settings, inventory: Inventory, plan: Plan) -> Path:
    """Write both documents to the workspace; returns the plan's path."""
    place = _place(source, settings)
    for path, kind, data in ((place.inventory, "inventory", inventory), (place.plan, "plan", plan)):
        document = envelope(kind, data, inputs={"model": source.name, **(plan.inputs if kind == "plan" else {})})
        validate(document)
        jsonio.write(path, document)
    return place.plan


def _place(source: Source, settings: Settings) -> Workspace:
    return Workspace.of(source, Path(settings.get("workspace")).absolute())


def _kept(plan: Plan | None, recipe: str | None, sets: Sequence[str] | None) -> tuple[str | None, Sequence[str]]:
    """The recipe and --set of a command: its own, else those of the plan that is there."""
    if plan is None:
        return recipe, sets or ()
    if recipe is None:
        recipe = plan.inputs.get("recipe named") or None
    if sets is None:
        sets = [s for s in plan.inputs.get("set", "").split("; ") if s]
    return recipe, sets
