"""The code audit before a command does anything: said on stderr, and put beside the answer with --json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dz.cli import output
from dz.core.source import Source

if TYPE_CHECKING:
    from dz.inspect.audit import Audit

SHOWN = 40  # lines; what cannot run and what stands in comes first, and the document has all of them


def show_audit(source: Source, *, trust: bool, workspace: Path) -> None:
    """Audit the code of a source, if it has any, and say what was found. Nothing of it runs.

    Under `trust` raises Refused for code that cannot run here, by file and line, and for code in another repository."""
    from dz.inspect.audit import audit

    found = audit(source, model_type=_model_type(source), workspace=workspace)
    if found is None:
        return
    out = output.get()
    out.attach("audit", found.data())
    _say(found)
    if trust:
        from dz.hub.remote_code import refuse_foreign
        from dz.upstream.refusals import refuse

        refuse_foreign(source)
        refuse(source, found.refusals)


def _say(found: Audit) -> None:
    out = output.get()
    out.note(found.summary())
    for finding in found.findings[:SHOWN]:
        out.note(f"  {finding.words()}")
    if len(found.findings) > SHOWN:
        out.note(f"  and {len(found.findings) - SHOWN} more: --json lists them")
    for place in found.unchecked[:3]:
        out.note(f"  {place}: only running could tell whether it is there")
    if found.vendor:
        out.note(found.vendor)


def _model_type(source: Source) -> str:
    """config.json's model_type; empty where there is none. What is wrong with the file is said by who needs it."""
    try:
        data = json.loads((source.path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(data.get("model_type", "")) if isinstance(data, dict) else ""
