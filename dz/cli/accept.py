"""`dz accept`: the Day-0 checklist on a model, and a report that a CI job can read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dz.cli import common, output
from dz.cli.audit import show_audit
from dz.cli.common import resolve_settings
from dz.cli.options import ChecklistOption, Device, JunitXml, Model, Plugins, TrustRemoteCode, Workspace
from dz.core.envelope import envelope
from dz.errors import UsageError
from dz.settings import Settings

if TYPE_CHECKING:
    from dz.accept.accept import Outcome, Request
    from dz.core.check import Result

Expression = Annotated[str, typer.Option("-k", metavar="EXPR", help="Only checks whose names match, as in pytest.")]
ExitFirst = Annotated[bool, typer.Option("-x", "--exitfirst", help="End after the first failure.")]
MaxFail = Annotated[int, typer.Option("--maxfail", metavar="N", min=0, help="End after N failures (0: never).")]
List = Annotated[bool, typer.Option("--list", help="List the checks and what is known of them; run nothing.")]
Resume = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Keep results whose inputs have not changed (default: keep).")
]
LastFailed = Annotated[bool, typer.Option("--lf", "--last-failed", help="Only what did not pass last time.")]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Also write the report there.")]
Url = Annotated[str, typer.Option("--url", metavar="URL", help="Check a server that runs already.")]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="End with 0 even if checks failed.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="What the server computes in; auto: the checkpoint's own (DZ_DTYPE, default here: float32).",
        show_default=False,
    ),
]
VERIFICATION = "float32"  # lower precisions move tokens, and what moves them cannot be told from a small fault
COLUMNS = ("CHECK", "STATUS", "VALUE", "THRESHOLD", "REASON")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("accept")(accept)


def accept(
    model: Model,
    checklist: ChecklistOption = "default",
    expression: Expression = "",
    exitfirst: ExitFirst = False,
    maxfail: MaxFail = 0,
    list_only: List = False,
    resume: Resume = True,
    last_failed: LastFailed = False,
    junit_xml: JunitXml = None,
    report: ReportFile = None,
    url: Url = "",
    exit_zero: ExitZero = False,
    trust_remote_code: TrustRemoteCode = False,
    device: Device = None,
    dtype: Dtype = None,
    plugin: Plugins = None,
    workspace: Workspace = None,
) -> int:
    """Run the Day-0 checklist on a model: start the server, ask it over HTTP, compare it with upstream's own run.

    Examples:
      dz accept org/name
      dz accept org/name -k "text or image" -x --junit-xml results.xml
      dz accept ./folder --checklist quick --url http://127.0.0.1:8000
      dz accept org/name --dtype auto         in the checkpoint's own precision, with wider tie margins

    Results are written as they come; a rerun keeps what is still true. 0 when all passed, 1 when not."""
    from dz.accept.accept import Request, run
    from dz.accept.runner import Choice

    if maxfail and exitfirst and maxfail != 1:
        what = f"-x and --maxfail {maxfail} together"
        raise UsageError(what, "-x is --maxfail 1", "leave one out", code="conflict")
    request = Request(
        model=model,
        checklist=checklist,
        settings=_settings(device, dtype, workspace, url),
        choice=Choice(
            expression=expression, last_failed=last_failed, resume=resume, maxfail=1 if exitfirst else maxfail
        ),
        trust=trust_remote_code,
        plugins=tuple(plugin or ()),
        url=url,
        serve=_settings_files(),
    )
    if list_only:
        return _list(request)
    done = run(
        request,
        output.get().progress(),
        _told,
        look=lambda source: show_audit(source, trust=request.trust, workspace=request.base),
    )
    if report is not None:
        done.write(report)
    if junit_xml is not None:
        done.junit(junit_xml)
    return _show(done, model, exit_zero=exit_zero)


def _settings(device: str | None, dtype: str | None, workspace: str | None, url: str) -> Settings:
    """The settings; a server that is started here computes in float32 unless something else was asked for anywhere."""
    flags = {"device": device, "dtype": dtype, "workspace": workspace}
    found = resolve_settings(flags)
    chosen = any(v.name == "dtype" and v.origin != "default" for v in found.values())
    return found if chosen or url else resolve_settings({**flags, "dtype": VERIFICATION})


def _settings_files() -> tuple[str, ...]:
    """The common options that decide which settings files the server reads too."""
    given = common.current()
    if given.no_config:
        return ("--no-config",)
    return ("--config", str(given.config)) if given.config else ()


def _told(result: Result, kept: bool) -> None:
    how = "kept from before" if kept else f"{result.seconds:.1f} s"
    output.get().note(f"{result.status.upper():5} {result.id} ({how}): {result.reason}")


def _list(request: Request) -> int:
    from dz.accept.accept import overview

    out = output.get()
    rows = overview(request)
    out.document(envelope("checks", {"checklist": request.checklist, "checks": rows}, inputs={"model": request.model}))
    out.table(
        ("CHECK", "REQUIRED", "LAST", "SUMMARY", "PARAMETERS"),
        [
            (
                r["id"],
                r["required"],
                r["last"] or None,
                r["summary"],
                ", ".join(f"{k}={v}" for k, v in r["params"].items()),
            )
            for r in rows
            if r["chosen"]
        ],
    )
    return 0


def _show(done: Outcome, model: str, *, exit_zero: bool) -> int:
    from dz.accept.report import counts, row

    out = output.get()
    out.document(done.report.document())
    out.table(COLUMNS, [row(r) for r in done.results])
    bad = done.against
    counted = ", ".join(f"{n} {word}" for word, n in counts(done.results).items() if n)
    word = "passed" if not bad else "failed"
    left = f"; not run: {', '.join(done.report.missing)}" if done.report.missing else ""
    out.result(word, f"{word}: {counted or 'nothing was run'}{left} -> {done.path}")
    if bad:
        out.hint(f"dz accept {model} --lf")
    else:
        out.hint(f"dz serve {model}")
    return 0 if exit_zero or not bad else 1
