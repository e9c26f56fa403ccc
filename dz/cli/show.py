"""`dz ls` and `dz show MODEL`: what the workspace holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dz.cli import output
from dz.cli.common import resolve_settings
from dz.cli.options import Model, Workspace
from dz.cli.progress import size
from dz.core import jsonio
from dz.core.envelope import envelope
from dz.core.workspace import Workspace as Place
from dz.errors import UsageError


class Part(StrEnum):
    """A document of a model's workspace."""

    fetch = "fetch"
    inventory = "inventory"
    plan = "plan"
    report = "report"


What = Annotated[
    Part | None, typer.Argument(metavar="PART", help="fetch, inventory, plan or report.", show_default=False)
]
ReportOf = Annotated[str, typer.Option("--checklist", metavar="NAME", help="Whose report.")]
MAKE = {Part.fetch: "fetch", Part.inventory: "adapt", Part.plan: "adapt", Part.report: "accept"}  # who writes a part


def register(app: typer.Typer) -> None:
    """Add the two commands."""
    app.command("ls")(ls)
    app.command("show")(show)


def ls(workspace: Workspace = None) -> None:
    """List the models of the workspace and how far each has come.

    Examples:
      dz ls
      dz ls --workspace /data/reports --json"""
    base = _base(workspace)
    rows = list(_models(base))
    out = output.get()
    out.document(envelope("models", {"workspace": str(base), "models": rows}))
    columns = ("MODEL", "REVISION", "SIZE", "PLAN", "REPORTS")
    out.table(columns, [(r["model"], r["rev8"], _size(r), r["plan"] or None, _verdicts(r)) for r in rows])
    if not rows:
        out.note(f"no models in {base}")
        out.hint("dz fetch org/name")


def show(model: Model, what: What = None, workspace: Workspace = None, checklist: ReportOf = "default") -> None:
    """Show a model's documents: all in short, or one in full.

    Examples:
      dz show org/name
      dz show org/name plan
      dz show org/name report --json"""
    from dz import hub

    base = _base(workspace)
    place = Place.of(hub.resolve(model, workspace=base, headers=True), base)
    out = output.get()
    if what is None:
        row = _row(place.folder)
        out.document(envelope("model", row, inputs={"model": model}))
        out.table(("FIELD", "VALUE"), _fields(row))
        return
    path = place.report(checklist) if what is Part.report else getattr(place, what.value)
    if not path.is_file():
        raise UsageError(
            f"{model} has no {what}", f"{path} is not there", f"dz {MAKE[what]} {model}", code="no_document"
        )
    document = jsonio.read(path)
    out.document(document)
    columns, rows = VIEWS[what](document["data"])
    out.table(columns, rows)
    out.note(str(path))


def _base(workspace: str | None) -> Path:
    return Path(resolve_settings({"workspace": workspace}).get("workspace")).absolute()


def _models(base: Path) -> Iterator[dict[str, Any]]:
    """A row for each folder of the workspace that holds a lock."""
    for lock in sorted(base.glob("*/fetch.json")):
        yield _row(lock.parent)


def _row(folder: Path) -> dict[str, Any]:
    place = Place(folder)
    source = jsonio.read(place.fetch)["data"]["source"]
    reports = {p.parent.name: jsonio.read(p).get("status", "") for p in sorted(folder.glob("*/report.json"))}
    return {
        "model": source["name"],
        "rev8": source["rev8"],
        "commit": source["commit"],
        "folder": source["folder"],
        "bytes": sum(f["size"] for f in source["files"]),
        "headers_only": bool(source.get("headers")),
        "inventory": place.inventory.is_file(),
        "plan": jsonio.read(place.plan)["data"]["hash"][:8] if place.plan.is_file() else "",
        "reports": reports,
        "workspace": str(folder),
    }


def _size(row: dict[str, Any]) -> str:
    return size(row["bytes"]) + (" on the hub, headers here" if row["headers_only"] else "")


def _verdicts(row: dict[str, Any]) -> str | None:
    return ", ".join(f"{name} {status}" for name, status in row["reports"].items()) or None


def _fields(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    shown = {**row, "bytes": _size(row), "reports": _verdicts(row), "plan": row["plan"] or None}
    del shown["headers_only"]  # the size says it
    yield from ((key, value if value != "" else None) for key, value in shown.items())


Table = tuple[tuple[str, ...], list[tuple[Any, ...]]]


def _fetch(data: dict[str, Any]) -> Table:
    return ("FILE", "BYTES", "SHA256"), [(f["path"], f["size"], f["sha256"] or None) for f in data["source"]["files"]]


def _inventory(data: dict[str, Any]) -> Table:
    columns = ("SITE", "CLASS", "STATUS", "OP", "N", "PARAMETERS", "WHY")
    return columns, [
        (s["id"], s["cls"], s["status"], s["op"], len(s["members"]), s["parameters"], s["reason"])
        for s in data["sites"]
    ]


def _plan(data: dict[str, Any]) -> Table:
    return ("SITE", "OP", "N", "PHASE", "RUNS", "WHY"), [
        (s["site"], s["op"], s["count"], phase, _impl(choice), choice["reason"])
        for s in data["sites"]
        for phase, choice in s["phases"].items()
    ]


def _impl(choice: dict[str, Any]) -> str:
    return choice["impl"] + (f" ({choice['tier']})" if choice.get("tier") else "")


def _report(data: dict[str, Any]) -> Table:
    columns = ("CHECK", "STATUS", "VALUE", "UNIT", "THRESHOLD", "N", "WHY")
    return columns, [
        (r["id"], r["status"].upper(), _short(r["value"]), r["unit"], _short(r["threshold"]), r["n"], r["reason"])
        for r in data["results"]
    ]


def _short(value: Any) -> str | None:
    return f"{value:.4g}" if isinstance(value, float) else None if value is None else str(value)


VIEWS: dict[Part, Callable[[dict[str, Any]], Table]] = {
    Part.fetch: _fetch,
    Part.inventory: _inventory,
    Part.plan: _plan,
    Part.report: _report,
}
