"""The `dz` command: collects the command files, runs one of them, and turns every failure into one form.

Each command file is named in COMMANDS and has `register(app)`, which adds plain typer commands. A command does its
work by calling one function and handing the result to `dz.cli.output`. It ends by returning (0), by returning an exit
code, or by raising; nothing else in dz prints an error or exits."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import typer

import dz
from dz.cli import common, output
from dz.errors import DzError, UsageError, explain

# command file -> the names it registers. A command that is named on the command line is imported alone; help and
# completion import all of them, so they must stay cheap: no torch, no transformers, heavy imports inside the functions.
COMMANDS: dict[str, tuple[str, ...]] = {
    "fetch": ("fetch",),
    "adapt": ("adapt",),
    "accept": ("accept",),
    "serve": ("serve",),
    "bench": ("bench",),
    "demo": ("demo",),
    "show": ("ls", "show"),
    "listing": ("ops", "kernels", "recipes", "checklists"),
    "doctor": ("doctor",),
    "config": ("config",),
}

EXAMPLES = """
Examples:
  dz fetch org/name            download, pinned and checked byte by byte
  dz adapt org/name            choose and prove a kernel for each op
  dz accept org/name           run the Day-0 checklist
  dz serve org/name            serve it with an OpenAI-compatible API
"""


class Interrupted(DzError):
    """Ctrl-C."""

    exit_code = 130


def run() -> None:
    """The entry point of the `dz` script and of `python -m dz`."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Everything that was raised has been said."""
    common.begin(argv)
    try:
        code = build(argv)(args=list(argv), prog_name="dz", standalone_mode=False)
    except SystemExit as e:
        if not isinstance(e.__context__, BrokenPipeError):
            raise
        return 0  # typer's own text (help, completion) met a reader that went away
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    except Exception as e:  # noqa: BLE001  the one place where every failure gets its form and its exit code
        return fail(e, argv)
    if code == Interrupted.exit_code:
        again = "run the same command again; what was finished is kept"
        return fail(Interrupted("interrupted", "Ctrl-C", again, code="interrupted"), argv)
    return code if isinstance(code, int) and not isinstance(code, bool) else 0


def build(argv: Sequence[str] = ()) -> typer.Typer:
    """The typer app with every command, or with the one that `argv` begins with."""
    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    _root(app)
    wanted = [file for file, names in COMMANDS.items() if argv and argv[0] in names]
    for file in wanted or COMMANDS:
        importlib.import_module(f"dz.cli.{file}").register(app)
    common.dress(app)
    return app


def _root(app: typer.Typer) -> None:
    @app.callback(invoke_without_command=True, help=f"{dz.__doc__}\n{EXAMPLES}")
    def root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            if output.get().json:
                raise UsageError("no command was given", "dz does nothing by itself", "dz --help", code="usage")
            output.get().line(context.get_help())
            raise typer.Exit(UsageError.exit_code)


def fail(exc: Exception, argv: Sequence[str] = ()) -> int:
    """Say what went wrong in the form that was asked for; returns the exit code."""
    out = output.get()
    if out.verbose > 1 or os.environ.get("DZ_DEBUG"):
        from dz.hub.faults import blot  # a client's own words may hold a signed address

        out.warn(blot("".join(traceback.format_exception(exc)).rstrip()))
    error = usage(exc, argv) or (None if _ours_is_missing(exc) else explain(exc)) or internal(exc)
    out.error(error)
    return error.exit_code


def usage(exc: Exception, argv: Sequence[str] = ()) -> DzError | None:
    """The UsageError for an error of typer's parser, known by how it behaves; None for anything else."""
    message: Callable[[], str] | None = getattr(exc, "format_message", None)
    if message is None or not hasattr(exc, "exit_code"):
        return None
    what, _, guess = message().replace("Value error, ", "").strip().partition(" Did you mean ")
    what = what.partition(" (Possible")[0].rstrip(".")
    near = difflib.get_close_matches(getattr(exc, "option_name", ""), getattr(exc, "possibilities", None) or (), 1)
    context: Any = getattr(exc, "ctx", None)
    if near or guess:
        why = f"did you mean {near[0] if near else guess.strip(' ?')}?"
    elif context is not None:
        why = context.get_usage().strip().replace("Usage:", "usage:", 1)
    else:
        why = "the command line cannot be read"
    named = [word for word in argv[:1] if any(word in names for names in COMMANDS.values())]
    command = context.command_path if context is not None else " ".join(["dz", *named])
    return UsageError(what[:1].lower() + what[1:], why, f"{command} --help", code="usage")


def internal(exc: Exception) -> DzError:
    """The error for a defect of dz: the traceback goes to a file, its path into the message."""
    with tempfile.NamedTemporaryFile("w", prefix="dz-traceback-", suffix=".txt", delete=False, encoding="utf-8") as f:
        f.write(f"dz {dz.__version__}, Python {sys.version}\n\n{''.join(traceback.format_exception(exc))}")
    what = f"internal error: {type(exc).__name__}: {exc}".strip()
    return DzError(
        what, f"this is a defect in dz; the traceback is in {f.name}", "report it with that file", code="internal"
    )


def _ours_is_missing(exc: Exception) -> bool:
    """A module of dz itself that cannot be imported is a defect, not a package to install."""
    return isinstance(exc, ModuleNotFoundError) and (exc.name or "").partition(".")[0] == "dz"
