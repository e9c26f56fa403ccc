"""`dz demo`: fetch, adapt, accept and serve on a tiny repository that ships with dz."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dz.cli import output
from dz.core.envelope import envelope

if TYPE_CHECKING:
    from dz.demo.steps import Step

Keep = Annotated[bool, typer.Option("--keep", help="Keep the folder with the model, the reports and the logs.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(keep: Keep = False) -> int:
    """Carry a tiny model with code of its own through the whole chain, and show what happened.

    The model ships with dz: sparse and linear attention, MXFP4 experts, vision, random weights. Needs no network.

    Examples:
      dz demo
      dz demo --keep --json

    Exit 0 when every step is ok, else the exit code of the first that is not."""
    from dz.demo import run

    out = output.get()
    folder = Path(tempfile.mkdtemp(prefix="dz-demo-"))
    try:
        out.note(f"working in {folder}")
        steps = run.run(folder, out.progress())
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    _show(steps, folder if keep else None)
    return run.exit_code(steps)


def _show(steps: list[Step], kept: Path | None) -> None:
    from dz.demo import run

    out = output.get()
    failed = [s for s in steps if s.status != "ok"]
    data = {"folder": str(kept) if kept else None, "seconds": sum(s.seconds for s in steps), "steps": steps}
    reasons = [f"{s.name}: {run.first_line(s)}" for s in failed]
    out.document(envelope("demo", data, status="fail" if failed else "ok", reasons=reasons))
    rows = [(s.name, s.status, f"{s.seconds:.1f}", run.first_line(s)) for s in steps]
    out.table(("STEP", "RESULT", "SECONDS", "WHAT HAPPENED"), rows)
    for step in failed:
        if step.status == "fail":
            out.note(f"{step.name} failed (exit code {step.exit_code}): {step.command}\n{step.reason}")
    if kept:
        out.note(f"kept: {kept}")
    if output.get().quiet:
        out.result("fail" if failed else "ok")
