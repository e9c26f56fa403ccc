"""A check: what it needs, its parameters, and the function that gives a Result. One file each in checks/."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from dz.core import jsonio
from dz.core.check import Entry, Result, Status
from dz.errors import UsageError

if TYPE_CHECKING:
    from dz.accept.context import Context

Need = Literal["server", "own_server", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`needs`: a running server, one that dz accept itself started, the upstream run. `params` is the dataclass that a
    checklist's `params:` fill; `run` takes one."""

    id: str
    summary: str
    params: type
    run: Callable[[Context, Any], Result]
    needs: tuple[Need, ...] = ()


def _result(status: Status, reason: str, given: dict[str, Any]) -> Result:
    given["details"] = jsonio.to_builtins(given.get("details", {}))
    return Result(id="", status=status, reason=reason, **given)


def passed(reason: str, **given: Any) -> Result:
    """A Result that passed; `given` are its other fields. The runner fills in id, seconds and required."""
    return _result("pass", reason, given)


def failed(reason: str, **given: Any) -> Result:
    """A Result that failed."""
    return _result("fail", reason, given)


def skipped(reason: str, *, applies: bool = True, **given: Any) -> Result:
    """A Result that could not be had. `applies` False: there is nothing to check in this model, so that even a required
    check does not count against the verdict."""
    return _result("skip", reason, {**given, "required": applies})


def discover() -> dict[str, Check]:
    """Every `CHECK` in dz/accept/checks, by id. Raises RuntimeError for a file whose check is named otherwise."""
    import dz.accept.checks as package

    out: dict[str, Check] = {}
    for item in pkgutil.iter_modules(package.__path__):
        check = importlib.import_module(f"dz.accept.checks.{item.name}").CHECK
        if check.id != item.name:
            raise RuntimeError(f"dz/accept/checks/{item.name}.py calls its check {check.id}")
        out[check.id] = check
    return out


def find(entry: Entry, known: dict[str, Check], where: str) -> Check:
    """The check of a checklist's line. Raises UsageError with the nearest name."""
    if entry.check in known:
        return known[entry.check]
    near = difflib.get_close_matches(entry.check, list(known), 1)
    why = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}"
    raise UsageError(f"{where} names the check '{entry.check}'", why, "mend the checklist", code="unknown_check")


def params_of(check: Check, entry: Entry, where: str) -> Any:
    """The check's parameters as the line gives them. Raises UsageError for unknown names and wrong types."""
    known = [f.name for f in fields(check.params)]
    for name in entry.params:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            why = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}"
            what = f"{where}: {entry.name} has the unknown parameter '{name}'"
            raise UsageError(what, why, "mend the checklist", code="unknown_parameter")
    return jsonio.from_builtins(check.params, entry.params, where=f"{where}: params of {entry.name}")
