"""dz accept as one function: from MODEL and a checklist to a report."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dz.accept import plans, runner, stamp
from dz.accept import report as reports
from dz.accept.context import Context
from dz.accept.golden import Golden
from dz.accept.plans import Place
from dz.accept.report import Report
from dz.accept.server import Given, Own, Server, serve_command
from dz.core import jsonio, library
from dz.core.check import Checklist, Result, load_checklist
from dz.core.protocols import Progress
from dz.core.source import Source
from dz.core.workspace import Workspace
from dz.hub.lock import Lock
from dz.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to accept. `serve` are further arguments for `dz serve`; `url` is a server that runs already."""

    model: str
    checklist: str
    settings: Settings
    choice: runner.Choice
    trust: bool = False
    plugins: tuple[str, ...] = ()
    url: str = ""
    serve: tuple[str, ...] = ()

    @property
    def base(self) -> Path:
        """The workspace's root."""
        return Path(self.settings.get("workspace")).absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The whole report, the results that this run was about, and where the document lies."""

    report: Report
    results: tuple[Result, ...]
    path: Path

    @property
    def against(self) -> list[Result]:
        """The results of this run that count against the model."""
        return [r for r in self.results if reports.counts_against(r)]

    def write(self, path: Path) -> None:
        """The report's document at another place too."""
        jsonio.write(path, self.report.document())

    def junit(self, path: Path) -> None:
        """The report as JUnit XML."""
        reports.junit(self.report, path)


def checklist_of(name: str) -> Checklist:
    """The checklist of a name or a path. Raises UsageError."""
    return load_checklist(library.find("checklists", name))


def run(
    request: Request, progress: Progress, told: runner.Told, *, look: Callable[[Source], None] = lambda source: None
) -> Outcome:
    """Run a checklist. `look` sees the source before anything of it is used, and may refuse it. Raises DzError when
    there is nothing to run it on; Ctrl-C and SIGTERM end the server and keep every finished result."""
    from dz import hub

    checklist = checklist_of(request.checklist)
    runner.choose(runner.lines(checklist), request.choice, {})  # mistakes are told before anything is started
    lock = hub.resolve_lock(request.model, workspace=request.base, trust=request.trust)
    look(lock.source)
    workspace = Workspace.of(lock.source, request.base)
    folder = workspace.evidence(checklist.name)
    where, dtype, plan = _plan(request, lock, workspace, progress)
    about = _about(request, lock, checklist, dtype, plan)
    elsewhere = ("workspace", "port", "host")  # these decide where, not what
    settings = {v.name: v.value for v in request.settings.values() if v.name not in elsewhere}
    base = stamp.digest([about, settings, lock.stamps, stamp.code()])
    golden = Golden(
        lock,
        workspace.folder / "golden",
        trust=request.trust,
        plugins=request.plugins,
        log=folder / "reference.log",
        progress=progress,
    )
    server = _server(request, where, folder / "server.log")
    context = Context(
        lock=lock,
        workspace=workspace,
        name=checklist.name,
        inventory=where.space.inventory,
        dtype=dtype,
        server=server,
        golden=golden,
        progress=progress,
    )
    try:
        with _terminable():
            report, results = runner.run(context, checklist, request.choice, about, base=base, told=told)
    finally:
        server.stop()
        golden.close()
    return Outcome(report=report, results=tuple(results), path=workspace.report(checklist.name))


def overview(request: Request) -> list[dict[str, Any]]:
    """Each line of the checklist: its check, parameters, whether this choice takes it, and its last status ("" if it
    was never run). Runs nothing."""
    from dz import hub

    checklist = checklist_of(request.checklist)
    rows = runner.lines(checklist)
    source = hub.resolve(request.model, workspace=request.base)
    before = reports.earlier(Workspace.of(source, request.base).report(checklist.name))
    chosen = {row.entry.name for row in runner.choose(rows, request.choice, before)}
    return [
        {
            "id": row.entry.name,
            "check": row.check.id,
            "required": row.entry.required,
            "summary": row.check.summary,
            "params": jsonio.to_builtins(row.params),
            "needs": list(row.check.needs),
            "chosen": row.entry.name in chosen,
            "last": before[row.entry.name].result.status if row.entry.name in before else "",
        }
        for row in rows
    ]


def _server(request: Request, where: Place, log: Path) -> Server:
    if request.url:
        return Given(request.url)
    args: list[str] = ["--workspace", str(where.root), *request.serve]
    for name in ("device", "dtype"):
        args += [f"--{name}", where.settings.get(name)]
    args += ["--trust-remote-code"] if request.trust else []
    for plugin in request.plugins:
        args += ["--plugin", plugin]
    return Own(serve_command(request.model, args), log)


def _plan(request: Request, lock: Lock, workspace: Workspace, progress: Progress) -> tuple[Place, str, str]:
    """Where the server's plan lies, its dtype and its hash. Of a server given by its URL only the dtype is known that
    the user or the configuration names."""
    if request.url:
        given = request.settings.get("dtype")
        dtype = given if given != "auto" else plans.stated_dtype(lock)
        return Place(settings=request.settings, space=workspace), dtype, ""
    where = plans.place(request.settings, lock, workspace)
    return where, *plans.current(where, lock, trust=request.trust, progress=progress)


def _about(request: Request, lock: Lock, checklist: Checklist, dtype: str, plan: str) -> dict[str, Any]:
    source = lock.source
    return {
        "model": source.name,
        "rev8": source.rev8,
        "commit": source.commit,
        "code": source.code_hash[:16],
        "checklist": checklist.name,
        "plan": plan,
        "device": request.settings.get("device"),
        "dtype": dtype,
        "trust": request.trust,
        "plugins": list(request.plugins),
        "url": request.url,
        "serve": list(request.serve),
        "versions": stamp.versions(),
    }


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as Ctrl-C, so that the server and the upstream run end with us. Only the main thread may ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
