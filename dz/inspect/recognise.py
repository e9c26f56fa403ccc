"""Ask every op about a place in the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from dz.core.inventory import Match, SiteView
from dz.core.op import Op


def ask(ops: Iterable[Op], views: list[SiteView]) -> Match | None:
    """The one op's answer: a known match before a variant. Two ops that both know a place are no answer at all: then
    the reason names them and the place stays a variant of the first."""
    matches = [m for v in views for op in ops if op.recognise is not None and (m := op.recognise(v)) is not None]
    known = [m for m in matches if m.status == "known"]
    if len(known) > 1:
        names = ", ".join(m.op for m in known)
        return Match(op=known[0].op, status="variant", reason="several ops fit", differs=(f"{names} all fit",))
    return known[0] if known else matches[0] if matches else None


def views_of(fqn: str, module: nn.Module, parent: nn.Module | None, config: Any) -> list[SiteView]:
    """A module seen as itself and as the caller of an interface."""
    text = source_of(type(module).forward)
    kinds: tuple[Literal["module", "interface"], ...] = ("module", "interface")
    return [SiteView(kind=k, fqn=fqn, target=module, source=text, config=config, parent=parent) for k in kinds]


def source_of(function: Any) -> str:
    """A function's source, empty when it is not there."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


def place_of(target: Any) -> str:
    """`module:line` of a class or function."""
    target = inspect.unwrap(target)
    try:
        line = inspect.getsourcelines(target)[1]
    except (OSError, TypeError):
        return str(getattr(target, "__module__", ""))
    return f"{target.__module__}:{line}"


def words(found: list[str]) -> str:
    """Why no op took a place, from what it computes."""
    if not found:
        return "holds parameters for another module"
    return f"no op has this structure: {', '.join(found[:6])}" + (", ..." if len(found) > 6 else "")
