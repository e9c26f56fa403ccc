"""`dz fetch`: a repository at a pinned commit, or a local folder in place; verified, then locked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dz.core import jsonio
from dz.core.envelope import envelope
from dz.core.index import broken
from dz.core.protocols import Progress, Silent
from dz.core.source import FileEntry, Source
from dz.core.workspace import Workspace, root
from dz.errors import EnvironmentFailure, UsageError
from dz.hub import lock as locks
from dz.hub import metadata, space
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
    """What the user asked of `dz fetch`. Globs as `hf download` takes them; `token` is sent, never stored or shown;
    `metadata`: of the weight files the headers alone."""

    model: str
    revision: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    local_dir: Path | None = None
    token: str | None = field(default=None, repr=False)
    force: bool = False
    offline: bool = False
    metadata: bool = False
    endpoint: str = "https://huggingface.co"
    cache: Path | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """What of the request belongs into a document: everything but the token."""
        keys = ("model", "revision", "include", "exclude", "endpoint", "force", "metadata")
        return {k: jsonio.to_builtins(getattr(self, k)) for k in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A fetched source, the document of its lock and where it lies. `fresh`: nothing had to be done."""

    source: Source
    document: dict[str, Any]
    path: Path
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Where the files go, which they are, and what has to be done for each. `headers` are weight files of which only
    the header is wanted, `first` the bytes to ask of each, `had` the lock of an earlier fetch of the same kind."""

    target: Target
    chosen: Selection
    jobs: tuple[Job, ...]
    had: Lock | None = None
    headers: tuple[FileEntry, ...] = ()
    first: dict[str, int] = field(default_factory=dict)

    @property
    def need(self) -> int:
        """Bytes that are not on the disk yet, where the files go; headers go into the workspace."""
        return sum(j.bytes for j in self.jobs)

    def rows(self) -> tuple[tuple[str, int, bool], ...]:
        """(path, size, cached) of each file; of a header the bytes that will be asked for."""
        headers = ((f"{f.path}.header", self.first[f.path], False) for f in self.headers)
        return (*((j.entry.path, j.entry.size, not j.bytes) for j in self.jobs), *headers)


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
        plan = _plan(request, found)
        space.require(plan.target.folder, plan.need, model.text)
        space.require(workspace or root(), sum(plan.first.values()), model.text)
        return _carry_out(request, found, plan, workspace, progress)


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
        plan = _plan(request, found)
    return Preview(
        name=found.name,
        commit=found.commit,
        folder=str(plan.target.folder),
        files=plan.rows(),
        ignored=plan.chosen.ignored,
        left_out=tuple(sorted(plan.chosen.left_out)),
        need=plan.need + sum(plan.first.values()),
        free=space.free(plan.target.folder),
    )


def _folder(request: Request, model: Model, workspace: Path | None, progress: Progress) -> Fetched:
    given = [f for f in ("include", "exclude", "local_dir", "metadata") if getattr(request, f)]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(
            f"{flag} with the folder {request.model}",
            "a folder is used where it is, as it is",
            f"dz fetch {request.model}",
            code="folder_filter",
        )
    lock, fresh = register(model, workspace, progress=progress, strict=True, force=request.force, pin=True)
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
    enough = request.metadata or not lock.source.headers
    return same_place and enough and (same_files or covers) and not lock.broken and not lock.changed()


def _plan(request: Request, found: Pin) -> _Plan:
    """What has to be done. Refuses a repository that is not whole by its listing alone."""
    hub = _hub(request)
    local_dir = request.local_dir.absolute() if request.local_dir else None
    if local_dir is None and found.lock and found.lock.local_dir:
        local_dir = found.lock.source.path  # where the user put it before
    folder = hub.folder(found.name, found.commit, local_dir)
    target = Target(hub=hub, name=found.name, commit=found.commit, folder=folder, local_dir=local_dir)
    had = found.lock if found.lock and found.lock.source.path == folder else None
    if had and bool(had.source.headers) != request.metadata:
        had = None  # of another kind: it did not choose these files
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
    shards: tuple[FileEntry, ...] = ()
    if request.metadata:
        chosen, shards = metadata.narrow(chosen)
    known = had.unchanged() if had else {}
    broken_ones = had.broken if had else ()  # known to be, so they are not read once more before they are fetched
    jobs = tuple(
        target.job(f, known=known.get(f.path), force=request.force or f.path in broken_ones) for f in chosen.wanted
    )
    first = metadata.sizes(shards, chosen)
    return _Plan(target=target, chosen=chosen, jobs=jobs, had=had, headers=shards, first=first)


def _carry_out(request: Request, found: Pin, plan: _Plan, workspace: Path | None, progress: Progress) -> Fetched:
    target, chosen = plan.target, plan.chosen
    where = Source(
        name=found.name, folder=str(target.folder), commit=found.commit, rev8=found.commit[:8], code_hash="", files=()
    )
    if plan.headers:
        where = replace(where, headers=str(Workspace.of(where, workspace).headers.absolute()))
    files, wrong = transfer(target, plan.jobs, progress)
    kept = _headers(request, where, plan, progress)
    paths = [f.path for f in files]
    skip = {*chosen.left_out, *(f.file for f in (*wrong, *kept.faults))}
    header = kept.read if plan.headers else None
    findings = examine(target.folder, paths, layout=chosen.layout, left_out=skip, header=header, progress=progress)
    findings = replace(findings, faults=(*wrong, *kept.faults, *findings.faults))
    findings.refuse(f"{found.name}@{found.commit[:8]}", f"dz fetch {found.name}@{found.commit[:8]}")
    listed = tuple(sorted((*files, *plan.headers), key=lambda f: f.path))
    source = replace(where, code_hash=code_hash(target.folder, paths), files=listed)
    lock = _lock(request, found, plan, source, findings)
    document = locks.write(lock, workspace, inputs=request.inputs)
    return Fetched(source=source, document=document, path=Workspace.of(source, workspace).fetch)


def _headers(request: Request, where: Source, plan: _Plan, progress: Progress) -> metadata.Headers:
    if not plan.headers:
        return metadata.Headers()
    spoilt = {f.path for f in plan.headers} if request.force else {*(plan.had.spoilt() if plan.had else ())}
    return metadata.keep(plan.target, where, plan.headers, plan.first, progress, again=spoilt)


def _lock(request: Request, found: Pin, plan: _Plan, source: Source, findings: Findings) -> Lock:
    chosen = plan.chosen
    whole = plan.had is not None and not (plan.had.include or plan.had.exclude)
    gone = set(chosen.layout.shards) & chosen.left_out
    return Lock(
        source=source,
        requested=found.requested,
        endpoint=request.endpoint,
        local_dir=plan.target.local_dir is not None,
        complete=bool(chosen.layout.shards) and not (gone or plan.headers),
        hashed=all(map(hashable, chosen.wanted)) and not plan.headers,
        weights=locks.weights_of(findings),
        foreign_code=foreign_code(source.path, [f.path for f in source.files]),
        ignored=chosen.ignored,
        notes=(*findings.notes, *found.notes, *_notes(request, plan, sorted(gone))),
        stamps=stamps(source),
        include=() if whole else request.include,
        exclude=() if whole else request.exclude,
    )


def _notes(request: Request, plan: _Plan, gone: list[str]) -> list[str]:
    """What a reader of the lock should know about this fetch; `gone` are weight files left out on request."""
    notes = []
    if gone:
        of = len(plan.chosen.layout.shards)
        notes.append(f"{len(gone)} of {of} weight files were left out on request: {', '.join(gone[:3])}")
    if plan.headers:
        size = sum(f.size for f in plan.headers)
        notes.append(f"headers only: {len(plan.headers)} weight files ({size:,} bytes) were not fetched")
    if request.offline:
        notes.append("offline: taken from the cache as it was, not compared with the hub's listing")
    unhashed = [f.path for f in plan.chosen.wanted if not hashable(f)]
    if unhashed:
        notes.append(f"{request.endpoint} gives no hash for {len(unhashed)} files; only their sizes were compared")
    return notes
