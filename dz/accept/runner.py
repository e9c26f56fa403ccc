"""Run a checklist: choose its lines, keep what is still true, run the rest, write the report after each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dz.accept.check import Check, discover, failed, find, params_of, skipped
from dz.accept.client import AnswerError
from dz.accept.context import Context
from dz.accept.report import FINAL, Done, Report, counts_against, earlier
from dz.accept.select import expression
from dz.accept.stamp import inputs_of
from dz.core import jsonio
from dz.core.check import Checklist, Entry, Result
from dz.errors import DzError, EnvironmentFailure

Told = Callable[[Result, bool], None]  # a result, and whether it comes from an earlier run


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a checklist with its check and its parameters."""

    entry: Entry
    check: Check
    params: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which lines to run. `expression` is -k; `last_failed` only what did not pass last time; `resume` keeps results
    whose inputs are unchanged; `maxfail` ends after that many (0: never)."""

    expression: str = ""
    last_failed: bool = False
    resume: bool = True
    maxfail: int = 0


def lines(checklist: Checklist) -> list[Line]:
    """Every line with its check. Raises UsageError for unknown checks and parameters, before anything runs."""
    known, where = discover(), checklist.path
    out = []
    for entry in checklist.checks:
        check = find(entry, known, where)
        out.append(Line(entry=entry, check=check, params=params_of(check, entry, where)))
    return out


def choose(rows: Sequence[Line], choice: Choice, before: dict[str, Done]) -> list[Line]:
    """The lines that -k and --lf leave, in order. --lf without an earlier failure leaves all of them."""
    names = [row.entry.name for row in rows]
    wanted = expression(choice.expression, names) if choice.expression else lambda name: True
    out = [row for row in rows if wanted(row.entry.name)]
    if choice.last_failed:
        bad = {name for name, done in before.items() if counts_against(done.result)}
        out = [row for row in out if row.entry.name in bad] or out
    return out


def run(
    context: Context, checklist: Checklist, choice: Choice, about: dict[str, Any], *, base: str, told: Told
) -> tuple[Report, list[Result]]:
    """Run what `choice` leaves: (the whole report, the results of this choice). `base` is the digest of what every
    result depends on; `about` goes into the document. What is finished is on disk whenever it is interrupted."""
    rows = lines(checklist)
    path = context.workspace.report(checklist.name)
    before = earlier(path)
    keys = {row.entry.name: inputs_of(row.entry, base) for row in rows}
    report = Report(checklist=checklist, about=about)
    report.done |= {n: d for n, d in before.items() if keys.get(n) == d.inputs and d.result.status in FINAL}
    chosen = choose(rows, choice, before)
    results: list[Result] = []
    for row in chosen:
        name = row.entry.name
        again = not choice.resume or (choice.last_failed and name in before and counts_against(before[name].result))
        kept = None if again else report.done.get(name)
        if kept is None:
            report.done.pop(name, None)
            result = one(context, row)
            report.done[name] = Done(result=result, inputs=keys[name])
            jsonio.write(path, report.document())
        else:
            result = kept.result
        results.append(result)
        told(result, kept is not None)
        if choice.maxfail and sum(map(counts_against, results)) >= choice.maxfail:
            break
    jsonio.write(path, report.document())
    return report, results


def one(context: Context, line: Line) -> Result:
    """Run one check. Whatever goes wrong becomes its result: a server that answers wrongly has failed, what this
    machine lacks is a skip, anything else is an error with its traceback among the evidence."""
    context.progress.note(f"{line.entry.name}: {line.check.summary}")
    begun = time.monotonic()
    try:
        result = _missing(context, line.check) or line.check.run(context, line.params)
    except AnswerError as e:
        result = failed(f"{e.what}: {e.why}")
    except EnvironmentFailure as e:
        result = skipped(f"{e.what}: {e.why}")
    except DzError as e:
        result = _error(f"{e.what}: {e.why}")
    except Exception as e:  # noqa: BLE001  a defect of one check must not lose the results of the others
        path = context.folder / f"{line.entry.name}-traceback.txt"
        jsonio.write_text(path, "".join(traceback.format_exception(e)))
        result = replace(_error(f"{type(e).__name__}: {e}"), evidence=(context.relative(path),))
    return replace(
        result,
        id=line.entry.name,
        required=line.entry.required and result.required,
        seconds=round(time.monotonic() - begun, 3),
    )


def _missing(context: Context, check: Check) -> Result | None:
    """A skip when what the check needs is not there."""
    if "own_server" in check.needs and not context.server.own:
        return skipped("the server was given by --url; this needs one that dz accept starts")
    if "server" in check.needs or "own_server" in check.needs:
        try:
            context.client()
        except DzError as e:
            return skipped(f"there is no server: {e.what}: {e.why}")
    return None


def _error(reason: str) -> Result:
    return Result(id="", status="error", reason=reason)
