"""A Day-0 check, its result, and a checklist of them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from dz.core import jsonio
from dz.errors import UsageError

Status = Literal["pass", "fail", "skip", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one check. `n` is how many samples stand behind `value`; `evidence` are paths relative to the
    workspace; `seconds` is how long it took."""

    id: str
    status: Status
    reason: str
    value: float | str | None = None
    unit: str = ""
    threshold: float | str | None = None
    n: int = 0
    required: bool = True
    seconds: float = 0.0
    evidence: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a checklist: which check, whether a skip counts against the verdict, and its parameters."""

    check: str
    id: str = ""
    required: bool = True
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The id in reports: `id` where given, else the check's own name."""
        return self.id or self.check


@dataclass(frozen=True, slots=True, kw_only=True)
class Checklist:
    """An ordered list of checks, read from YAML."""

    name: str
    summary: str = ""
    checks: tuple[Entry, ...] = ()
    path: str = ""


def load_checklist(path: Path) -> Checklist:
    """The checklist at `path`. Raises UsageError for bad YAML, unknown keys and repeated ids."""
    try:
        data = yaml.safe_load(path.read_text("utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not valid YAML", " ".join(str(e).split()), "mend the file", code="bad_yaml") from e
    if not isinstance(data, dict):
        raise UsageError(
            f"{path} holds no mapping",
            f"its top level is a {type(data).__name__}",
            "see `dz checklists show default`",
            code="bad_checklist",
        )
    if not isinstance(data.get("checks", []), list):
        what, why = f"{path} has no list of checks", f"'checks' is a {type(data['checks']).__name__}"
        raise UsageError(what, why, "see `dz checklists show default`", code="bad_checklist")
    for known, rows in (
        (Checklist.__dataclass_fields__, [data]),
        (Entry.__dataclass_fields__, data.get("checks") or []),
    ):
        for row in rows:
            for key in row if isinstance(row, dict) else ():
                if key not in known:
                    near = difflib.get_close_matches(str(key), list(known), 1)
                    raise UsageError(
                        f"{path} has the unknown key '{key}'",
                        f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}",
                        "mend the file",
                        code="bad_checklist",
                    )
    out = jsonio.from_builtins(Checklist, {"name": path.stem, **data, "path": str(path)}, where=str(path))
    names = [c.name for c in out.checks]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UsageError(
            f"{path} names {', '.join(twice)} twice",
            "each line needs an id of its own",
            "give one of them an `id:`",
            code="bad_checklist",
        )
    return out
