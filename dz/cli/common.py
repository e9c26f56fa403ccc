"""The options that every command takes, and how a plain typer app is given them.

A command file declares only its own options. `dress(app)` adds --json, -q, -v, --color, --config, --no-config and -V to
every command and group of an app, reads them before the command runs, and sets up output and settings from them. They
may stand before or after the command's name; the later one wins."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import dz
from dz import settings
from dz.cli import output
from dz.core.envelope import envelope
from dz.errors import UsageError


class Color(StrEnum):
    """When to colour."""

    auto = "auto"
    always = "always"
    never = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The common options as given; None is "not given"."""

    json: bool | None = None
    quiet: bool | None = None
    verbose: int = 0
    color: Color | None = None
    config: Path | None = None
    no_config: bool | None = None


def _show_version(value: bool) -> None:
    if value:
        out = output.get()
        out.document(envelope("version", {"version": dz.__version__}))
        out.result(dz.__version__, f"dz {dz.__version__}")
        raise typer.Exit


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print the bare answer; no notes, hints or progress.")]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, show_default=False, help="Log more; -vv: tracebacks.")
]
ColorOption = Annotated[Color | None, typer.Option("--color", help="When to colour.", show_default=False)]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file instead of dz.toml.")]
NoConfig = Annotated[bool, typer.Option("--no-config", help="Read no settings files.")]
Version = Annotated[
    bool, typer.Option("-V", "--version", is_eager=True, callback=_show_version, help="Show the version.")
]

PREFIX = "common_"
OPTIONS: dict[str, tuple[Any, Any]] = {  # name in Common -> its option and its default on the command line
    "json": (Json, False), "quiet": (Quiet, False), "verbose": (Verbose, 0), "color": (ColorOption, None),
    "config": (Config, None), "no_config": (NoConfig, False), "version": (Version, False),
}  # fmt: skip

_current = Common()


def current() -> Common:
    """The common options of this invocation."""
    return _current


def resolve_settings(flags: Mapping[str, Any] | None = None) -> settings.Settings:
    """All settings of this invocation, with --config and --no-config respected. `flags` are the command's own, by
    setting name; None is "not given"."""
    return settings.resolve(flags, config=_current.config, no_config=bool(_current.no_config))


def begin(argv: Sequence[str]) -> None:
    """Start an invocation. Output flags are read from the bare words first, so that an error found while parsing
    already comes in the form that was asked for."""
    words = list(argv[: argv.index("--")] if "--" in argv else argv)
    global _current
    _current = Common(json="--json" in words or None, quiet=bool({"-q", "--quiet"} & set(words)) or None)
    color = next((w.partition("=")[2] for w in words if w.startswith("--color=")), "")
    if "--color" in words[:-1]:
        color = words[words.index("--color") + 1]
    if color in tuple(Color):
        _current = replace(_current, color=Color(color))
    _apply()


def dress(app: typer.Typer) -> None:
    """Give every command and group under `app` the common options, and its docstring's examples their own lines."""
    if app.registered_callback is not None and app.registered_callback.callback is not None:
        app.registered_callback.help = _help(app.registered_callback.help, app.registered_callback.callback)
        app.registered_callback.callback = _wrap(app.registered_callback.callback)
    for info in app.registered_commands:
        if info.callback is not None:
            info.help = _help(info.help, info.callback)
            info.callback = _wrap(info.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            dress(group.typer_instance)


def _help(text: Any, function: Callable[..., Any]) -> str:
    """Help text (given, or the docstring) in which the lines after "Examples:" are kept as they stand."""
    text = text if isinstance(text, str) else function.__doc__ or ""
    return inspect.cleandoc(text).replace("\nExamples:", "\n\n\b\nExamples:")


def _wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function, eval_str=True)
    extra = [
        inspect.Parameter(PREFIX + name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
        for name, (option, default) in OPTIONS.items()
    ]

    def run(**given: Any) -> Any:
        common = {name: given.pop(PREFIX + name) for name in OPTIONS}
        common.pop("version")
        _merge(common)
        return function(**given)

    call: Any = functools.wraps(function)(run)
    del call.__wrapped__  # the signature to read is the one set here
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])
    call.__annotations__ = {p.name: p.annotation for p in call.__signature__.parameters.values()}
    return call


def _merge(given: dict[str, Any]) -> None:
    """Take over what was given at this level; what was not given keeps what an outer level said."""
    global _current
    _current = replace(_current, **{k: v for k, v in given.items() if v})
    if _current.config and _current.no_config:
        what = f"--config {_current.config} and --no-config together"
        raise UsageError(what, "one names a settings file, the other forbids them", "leave one out", code="conflict")
    if _current.quiet and _current.verbose:
        raise UsageError(
            "-q and -v together", "one asks for less, the other for more", "leave one out", code="conflict"
        )
    _apply()


def _apply() -> None:
    c, old = _current, output.get()
    output.use(
        output.Out(
            json=bool(c.json),
            quiet=bool(c.quiet),
            verbose=c.verbose,
            color=(c.color or Color.auto).value,
            stdout=old.stdout,
            stderr=old.stderr,
        )
    )
    level = {0: logging.WARNING, 1: logging.INFO}.get(c.verbose, logging.DEBUG)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("dz").setLevel(level)
