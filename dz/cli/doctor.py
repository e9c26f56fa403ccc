"""`dz doctor`: what of this machine matters to dz, each line with a verdict and a next step."""

from __future__ import annotations

import typer

from dz.cli import output
from dz.cli.common import resolve_settings
from dz.cli.options import Workspace
from dz.core.envelope import envelope
from dz.errors import EnvironmentFailure


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(workspace: Workspace = None) -> int:
    """Check this machine: Python, packages, devices, memory, disk, the hub, ops and kernels.

    Examples:
      dz doctor
      dz doctor --json

    Exit 0 when nothing fails, 3 otherwise; warnings do not count."""
    from dz.cli import health

    lines = health.examine(resolve_settings({"workspace": workspace}))
    failed = [line for line in lines if line.status == "fail"]
    out = output.get()
    reasons = [f"{line.item}: {line.found}" for line in lines if line.status != "ok"]
    out.document(envelope("doctor", {"lines": lines}, status="fail" if failed else "ok", reasons=reasons))
    out.table(("ITEM", "STATUS", "FOUND"), [(line.item, line.status, line.found) for line in lines])
    for line in lines:
        if line.next:
            out.hint(f"{line.item}: {line.next}")
    if output.get().quiet:
        out.result("fail" if failed else "ok")
    return EnvironmentFailure.exit_code if failed else 0
