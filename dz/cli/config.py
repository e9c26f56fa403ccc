"""`dz config show`: every setting, its value and where it came from."""

from __future__ import annotations

from typing import Annotated

import typer

from dz.cli import output
from dz.cli.common import resolve_settings
from dz.core.envelope import envelope
from dz.settings import SPECS

Origin = Annotated[bool, typer.Option("--origin", help="Also show where each value came from.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer()
    group.callback(invoke_without_command=True)(config)
    group.command("show")(show)
    app.add_typer(group, name="config")


def config(context: typer.Context) -> None:
    """Settings and where they came from."""
    if context.invoked_subcommand is None:
        show()


def show(origin: Origin = False) -> None:
    """Show every setting as a command without flags would see it.

    Examples:
      dz config show
      dz config show --origin
      DZ_PORT=9000 dz config show --json"""
    out = output.get()
    values = resolve_settings().values()
    rows = [{"name": v.name, "value": v.value, "origin": v.origin, "help": SPECS[v.name].help} for v in values]
    out.document(envelope("config", {"settings": rows}))
    if origin:
        out.table(("SETTING", "VALUE", "FROM"), [(v.name, str(v.value), v.origin) for v in values])
        out.note("order: flag, DZ_*, dz.toml, user config, recipe, default")
    else:
        out.table(("SETTING", "VALUE", "WHAT"), [(v.name, str(v.value), SPECS[v.name].help) for v in values])
