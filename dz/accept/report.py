"""The report of a checklist: results in its order, written after every check, read again to resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dz.core import jsonio
from dz.core.check import Checklist, Result
from dz.core.envelope import envelope

Verdict = Literal["pass", "fail", "incomplete"]
FINAL = ("pass", "fail")  # a skip or an error is tried again: its cause may be gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A result and the digest of everything that it depends on; `kept` when it comes from an earlier run."""

    result: Result
    inputs: str
    kept: bool = False


@dataclass(slots=True, kw_only=True)
class Report:
    """What is known of a checklist's checks, by the name of their line. `about` says what was tested with what: it goes
    into the envelope's inputs."""

    checklist: Checklist
    about: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)

    @property
    def results(self) -> list[Result]:
        """The results in the checklist's order."""
        return [self.done[e.name].result for e in self.checklist.checks if e.name in self.done]

    @property
    def missing(self) -> list[str]:
        """The lines without a result."""
        return [e.name for e in self.checklist.checks if e.name not in self.done]

    @property
    def verdict(self) -> Verdict:
        """fail when a result counts against the model, incomplete when one is missing, else pass."""
        if any(counts_against(r) for r in self.results):
            return "fail"
        return "incomplete" if self.missing else "pass"

    def document(self) -> dict[str, Any]:
        """The envelope with every result."""
        rows = [{**jsonio.to_builtins(d.result), "inputs": d.inputs} for d in map(self.done.get, self._names()) if d]
        reasons = [f"{r.id}: {r.reason}" for r in self.results if counts_against(r)]
        reasons += [f"{name}: not run" for name in self.missing]
        data = {
            "checklist": self.checklist.name,
            "verdict": self.verdict,
            "counts": counts(self.results),
            "missing": self.missing,
            "results": rows,
        }
        return envelope("report", data, inputs=self.about, status=self.verdict, reasons=reasons)

    def _names(self) -> list[str]:
        return [e.name for e in self.checklist.checks]


def counts_against(result: Result) -> bool:
    """Whether a result makes the verdict 1: anything but a pass, and a skip only of what is required."""
    return result.status in ("fail", "error") or (result.status == "skip" and result.required)


def counts(results: Sequence[Result]) -> dict[str, int]:
    """How many results of each status."""
    return {s: sum(r.status == s for r in results) for s in ("pass", "fail", "skip", "error")}


def earlier(path: Path) -> dict[str, Done]:
    """The results of the report at `path`, by id; empty when there is none. Raises UsageError when it is not one."""
    if not path.is_file():
        return {}
    document = jsonio.read(path)
    rows = document.get("data", {}).get("results", []) if isinstance(document, dict) else []
    out = {}
    for row in rows if isinstance(rows, list) else []:
        result = jsonio.from_builtins(Result, row, where=str(path))
        out[result.id] = Done(result=result, inputs=str(row.get("inputs", "")), kept=True)
    return out


def junit(report: Report, path: Path) -> None:
    """Write the results as JUnit XML. A check that was not run is a skipped test."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    kinds: Mapping[str, Any] = {"fail": Failure, "skip": Skipped, "error": Error}
    suite = TestSuite(f"dz accept {report.checklist.name}")
    for result in report.results:
        case = TestCase(result.id, classname=f"dz.{report.checklist.name}", time=round(result.seconds, 3))
        if result.status == "skip" and result.required:
            case.result = [Failure(f"required, but skipped: {result.reason}", "skip")]
        elif result.status != "pass":
            case.result = [kinds[result.status](result.reason, result.status)]
        case.system_out = jsonio.dumps(result)
        suite.add_testcase(case)
    for name in report.missing:
        case = TestCase(name, classname=f"dz.{report.checklist.name}")
        case.result = [Skipped("not run")]
        suite.add_testcase(case)
    for key, value in report.about.items():
        suite.add_property(str(key), str(value))
    xml = JUnitXml("dz accept")
    xml.add_testsuite(suite)
    xml.update_statistics()
    path.parent.mkdir(parents=True, exist_ok=True)
    xml.write(str(path), pretty=True)


def row(result: Result) -> tuple[str, str, str | None, str | None, str]:
    """A line of the verdict table: check, status, value, threshold, reason."""
    kind = result.status.upper()
    unit = f" {result.unit}" if result.unit else ""
    value = None if result.value is None else f"{_short(result.value)}{unit}"
    return result.id, kind, value, None if result.threshold is None else _short(result.threshold), result.reason


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
