"""What the other commands left in the workspace, as figures for the demo's table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dz.core import jsonio
from dz.core.check import Result
from dz.core.inventory import Inventory
from dz.core.plan import Plan
from dz.errors import Refused


def only(folder: Path, pattern: str) -> Path:
    """The one file that matches. Raises Refused when there is none or several: the command before did not do its
    work."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = ", ".join(str(p) for p in found) or "nothing"
        raise Refused(
            f"expected one {pattern} in {folder}", f"found {names}", "read the step's log", code="no_document"
        )
    return found[0]


def _data(folder: Path, pattern: str) -> Any:
    return jsonio.read(only(folder, pattern))["data"]


def fetched(workspace: Path) -> tuple[dict[str, Any], str]:
    """Files and tensors that fetch checked."""
    data = _data(workspace, "*/fetch.json")
    figures = {
        "files": len(data["source"]["files"]),
        "tensors": data["weights"]["tensors"],
        "shards": len(data["weights"]["shards"]),
        "bytes": data["weights"]["bytes"],
        "revision": data["source"]["rev8"],
    }
    return figures, "{files} files; {tensors} tensors in {shards} shards checked; revision {revision}".format(**figures)


def fitted(answer: Path) -> tuple[dict[str, Any], str]:
    """What was read of code, formats and room on a device without running any code of the repository."""
    document = jsonio.read(answer)
    data, audit = document["data"], document["audit"]
    best = max(data["splits"], key=lambda s: s["longest"])
    figures = {
        "code_files": len(audit["files"]),
        "findings": len(audit["findings"]),
        "formats": [f["name"] for f in data["formats"]],
        "bytes": data["bytes"],
        "unaccounted": data["unaccounted"],
        "device": data["device"]["name"],
        "fits": best["fits"],
        "longest": best["longest"],
    }
    text = (
        f"no code was run: {figures['code_files']} files read, {figures['findings']} findings; "
        f"{data['bytes'] / 1e6:.1f} MB in {' and '.join(figures['formats'])}, {data['unaccounted']} B unaccounted; "
        f"on one {figures['device']} {best['verdict']}, up to {best['longest']:,} tokens"
    )
    return figures, text


def differing(answer: Path) -> tuple[dict[str, Any], str]:
    """Sites by status, and the unknown one that the installed upstream comes nearest to."""
    data = jsonio.read(answer)["data"]
    near = [
        (n["likeness"], s["site"].rpartition(".")[2].rpartition(":")[2], n["name"].rpartition(":")[2])
        for s in data["sites"]
        if s["status"] == "unknown"
        for n in s["neighbours"]
    ]
    figures: dict[str, Any] = {**data["counts"], "places": data["index"], "nearest": max(near, default=None)}
    text = "{known} sites known, {variant} variant, {unknown} unknown".format(**data["counts"])
    if near:
        likeness, site, other = max(near)
        text += f"; of the unknown ones {site} comes nearest to upstream: {likeness:.0%} of {other}"
    return figures, text


def adapted(workspace: Path) -> tuple[dict[str, Any], str]:
    """Sites by status, tensors accounted for, swaps and how many of their phases were verified."""
    inventory = jsonio.from_builtins(Inventory, _data(workspace, "*/inventory.json"), where="inventory.json")
    plan = jsonio.from_builtins(Plan, _data(workspace, "*/plan.json"), where="plan.json")
    choices = [(s.site, phase, c) for s in plan.swaps() for phase, c in s.phases.items() if c.impl != "upstream"]
    figures = {
        "tensors_matched": inventory.coverage.matched,
        "tensors_unaccounted": len(inventory.coverage.missing) + len(inventory.coverage.unexpected),
        "known": inventory.count("known"),
        "variant": inventory.count("variant"),
        "unknown": inventory.count("unknown"),
        "swapped_sites": len(plan.swaps()),
        "choices": len(choices),
        "choices_verified": sum(c.verified is not None for _, _, c in choices),
        "kernels": sorted({c.impl for _, _, c in choices}),
    }
    text = (
        "{tensors_matched} tensors matched, {tensors_unaccounted} unaccounted; sites: {known} known, "
        "{variant} variant, {unknown} unknown; {swapped_sites} swapped, "
        "{choices_verified} of {choices} choices verified"
    ).format(**figures)
    return figures, text


def accepted(workspace: Path, checklist: str) -> tuple[dict[str, Any], str]:
    """Checks by status, and the names of those that did not pass."""
    data = _data(workspace, f"*/{checklist}/report.json")
    results = [jsonio.from_builtins(Result, r, where="report.json") for r in data["results"]]
    figures: dict[str, Any] = {status: _ids(results, status) for status in ("pass", "fail", "skip", "error")}
    parts = [f"{len(figures['pass'])} of {len(results)} checks passed"]
    parts += [f"{status}: {', '.join(figures[status])}" for status in ("fail", "error", "skip") if figures[status]]
    return figures, "; ".join(parts)


def _ids(results: Iterable[Result], status: str) -> list[str]:
    return [r.id for r in results if r.status == status]
