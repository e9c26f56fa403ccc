"""`dz fetch`: a repository at a pinned commit, or a local folder in place; verified, then locked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dz.core import jsonio
from dz.core.envelope import envelope
from dz.core.index import broken
from dz.core.protocols import Progress, Silent
from dz.core.source import Source
from dz.core.workspace import Workspace
from dz.errors import EnvironmentFailure, UsageError
from dz.hub import lock as locks
from dz.hub import space
from dz.hub.client import Hub, client_log
from dz.hub.digest import hashable
from dz.hub.local import register
from dz.hub.lock import Lock
from dz.hub.names import Model, near, parse
from dz.hub.pin import Pin, pin
from dz.hub.remote_code import foreign_code
from dz.hub.select import Selection, select
from dz.hub.stamp import code_hash, stamps
from dz.hub.transfer import Job, Target, transfer
from dz.hub.verify import Findings, examine


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked of `dz fetch`. Globs as `hf download` takes them; `token` is sent, never stored or shown."""

    model: str
    revision: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    local_dir: Path | None = None
    token: str | None = field(default=None, repr=False)
    force: bool = False
    offline: bool = False
    endpoint: str = "https://huggingface.co"
    cache: Path | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """What of the request belongs into a document: everything but the token."""
        keys = ("model", "revision", "include", "exclude", "endpoint", "force")
        return {k: jsonio.to_builtins(getattr(self, k)) for k in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A fetched source, the document of its lock and where it lies. `fresh`: nothing had to be done."""

    source: Source
    document: dict[str, Any]
    path: Path
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a fetch would do: `files` are (path, size, cached); bytes `need`ed and `free` where they would go."""

    name: str
    commit: str
    folder: str
    files: tuple[tuple[str, int, bool], ...]
    ignored: tuple[locks.Ignored, ...]
    left_out: tuple[str, ...]
    need: int
    free: int

    def document(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The `dz.fetch/1` document of a dry run."""
        rows = [{"path": p, "size": s, "cached": c} for p, s, c in self.files]
        data = {**jsonio.to_builtins(self), "files": rows}
        reasons = [] if self.need <= self.free else [f"{self.need:,} bytes needed, {self.free:,} free"]
        return envelope("fetch", data, inputs=inputs, status="dry-run", reasons=reasons)


def fetch(request: Request, *, workspace: Path | None = None, progress: Progress | None = None) -> Fetched:
    """Make a model's files present, whole and locked. Raises DzError; what arrived before an error stays."""
    progress = progress or Silent()
    model = parse(request.model, request.revision)
    if model.path is not None:
        return _folder(request, model, workspace, progress)
    with client_log(progress, request.token):
        found = _pin(request, model, workspace)
        if found.lock and not request.force and _fresh(found.lock, request):
            for note in found.notes:
                progress.note(note)
            path = Workspace.of(found.lock.source, workspace).fetch
            return Fetched(source=found.lock.source, document=jsonio.read(path), path=path, fresh=True)
        target, chosen, jobs = _plan(request, found)
        space.require(target.folder, sum(j.bytes for j in jobs), model.text)
        return _carry_out(request, found, target, chosen, jobs, workspace, progress)


def preview(request: Request, *, workspace: Path | None = None, progress: Progress | None = None) -> Preview:
    """What `fetch` would do, without writing anything."""
    progress = progress or Silent()
    model = parse(request.model, request.revision)
    if model.path is not None:
        raise UsageError(
            f"--dry-run with the folder {request.model}",
            "a folder is checked in place; nothing would be downloaded",
            f"dz fetch {request.model}",
            code="folder_dry_run",
        )
    with client_log(progress, request.token):
        found = _pin(request, model, workspace)
        for note in found.notes:
            progress.note(note)
        target, chosen, jobs = _plan(request, found)
    return Preview(
        name=found.name,
        commit=found.commit,
        folder=str(target.folder),
        files=tuple((j.entry.path, j.entry.size, not j.bytes) for j in jobs),
        ignored=chosen.ignored,
        left_out=tuple(sorted(chosen.left_out)),
        need=sum(j.bytes for j in jobs),
        free=space.free(target.folder),
    )


def _folder(request: Request, model: Model, workspace: Path | None, progress: Progress) -> Fetched:
    given = [f for f in ("include", "exclude", "local_dir") if getattr(request, f)]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(
            f"{flag} with the folder {request.model}",
            "a folder is used where it is, as it is",
            f"dz fetch {request.model}",
            code="folder_filter",
        )
    lock, fresh = register(model, workspace, progress=progress, strict=True, force=request.force)
    path = Workspace.of(lock.source, workspace).fetch
    return Fetched(source=lock.source, document=jsonio.read(path), path=path, fresh=fresh)


def _hub(request: Request) -> Hub:
    return Hub(request.endpoint, token=request.token, cache=request.cache, offline=request.offline)


def _pin(request: Request, model: Model, workspace: Path | None) -> Pin:
    try:
        return pin(model, _hub(request), locks.of_name(model.name, workspace))
    except EnvironmentFailure as e:
        close = near(model.name, locks.names(workspace)) if e.code == "not_found" else []
        if not close:
            raise
        raise EnvironmentFailure(e.what, f"{e.why}; fetched before: {', '.join(close)}", e.next, code=e.code) from e


def _fresh(lock: Lock, request: Request) -> bool:
    """Whether the lock already answers the request, with every file as it was checked."""
    same_place = request.local_dir is None or request.local_dir.absolute() == lock.source.path
    same_files = (lock.include, lock.exclude) == (request.include, request.exclude)
    covers = not (lock.include or lock.exclude) and not request.include
    return same_place and (same_files or covers) and not lock.changed()


def _plan(request: Request, found: Pin) -> tuple[Target, Selection, list[Job]]:
    """Where the files go, which they are, and what has to be done for each. Refuses a repository that is not whole."""
    hub = _hub(request)
    local_dir = request.local_dir.absolute() if request.local_dir else None
    if local_dir is None and found.lock and found.lock.local_dir:
        local_dir = found.lock.source.path  # where the user put it before
    folder = hub.folder(found.name, found.commit, local_dir)
    target = Target(hub=hub, name=found.name, commit=found.commit, folder=folder, local_dir=local_dir)
    had = found.lock if found.lock and found.lock.source.path == folder else None
    chosen = select(
        hub.files(found.name, found.commit),
        lambda path: hub.read(found.name, found.commit, path),
        include=request.include,
        exclude=request.exclude,
        keep={f.path for f in had.source.files} if had else (),
    )
    if chosen.faults:
        text = f"{found.name}@{found.commit[:8]}"
        raise broken(text, chosen.faults, "look at the repository's other revisions", shards=len(chosen.layout.shards))
    known = had.unchanged() if had else {}
    return target, chosen, [target.job(f, known=known.get(f.path), force=request.force) for f in chosen.wanted]


def _carry_out(
    request: Request,
    found: Pin,
    target: Target,
    chosen: Selection,
    jobs: Sequence[Job],
    workspace: Path | None,
    progress: Progress,
) -> Fetched:
    files, wrong = transfer(target, jobs, progress)
    paths = [f.path for f in files]
    skip = {*chosen.left_out, *(f.file for f in wrong)}
    findings = examine(target.folder, paths, layout=chosen.layout, left_out=skip, progress=progress)
    findings = replace(findings, faults=(*wrong, *findings.faults))
    findings.refuse(f"{found.name}@{found.commit[:8]}", f"dz fetch {found.name}@{found.commit[:8]}")
    source = Source(
        name=found.name,
        folder=str(target.folder),
        commit=found.commit,
        rev8=found.commit[:8],
        code_hash=code_hash(target.folder, paths),
        files=tuple(files),
    )
    lock = _lock(request, found, target, source, chosen, findings)
    document = locks.write(lock, workspace, inputs=request.inputs)
    return Fetched(source=source, document=document, path=Workspace.of(source, workspace).fetch)


def _lock(request: Request, found: Pin, target: Target, source: Source, chosen: Selection, findings: Findings) -> Lock:
    paths = [f.path for f in source.files]
    had = found.lock if found.lock and found.lock.source.folder == source.folder else None
    whole = had is not None and not (had.include or had.exclude)
    gone = sorted(set(chosen.layout.shards) & chosen.left_out)
    notes = [*findings.notes, *found.notes]
    if gone:
        of = len(chosen.layout.shards)
        notes.append(f"{len(gone)} of {of} weight files were left out on request: {', '.join(gone[:3])}")
    if request.offline:
        notes.append("offline: taken from the cache as it was, not compared with the hub's listing")
    unhashed = [f.path for f in chosen.wanted if not hashable(f)]
    if unhashed:
        notes.append(f"{request.endpoint} gives no hash for {len(unhashed)} files; only their sizes were compared")
    return Lock(
        source=source,
        requested=found.requested,
        endpoint=request.endpoint,
        local_dir=target.local_dir is not None,
        complete=bool(chosen.layout.shards) and not gone,
        hashed=not unhashed,
        weights=locks.weights_of(findings),
        foreign_code=foreign_code(source.path, paths),
        ignored=chosen.ignored,
        notes=tuple(notes),
        stamps=stamps(source.path, paths),
        include=() if whole else request.include,
        exclude=() if whole else request.exclude,
    )
