"""Bytes from the hub to the disk: what is there is kept, and every file is compared with the hub's hash."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from dz.core.index import Fault
from dz.core.protocols import Progress
from dz.core.source import FileEntry
from dz.errors import DzError
from dz.hub.bar import Stopped, bar_class
from dz.hub.client import Hub
from dz.hub.digest import compare

WORKERS = 8  # files in flight, as the hub client does by default
_HOPELESS = ("auth", "gated", "not_found", "offline", "disk_full", "revision_not_found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A file to settle. `fetch`: it is not there, or not in its size (then `replace` is set), or it is forced.
    `bytes` will come over the network (0: the cache has the content and only links it). `settled`: an earlier run
    compared its bytes, and nobody has written to it since; `entry` then has its sha256."""

    entry: FileEntry
    fetch: bool = False
    settled: bool = False
    replace: bool = False
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a repository's files go: `folder` holds them; `local_dir` is set when that is not the client's cache."""

    hub: Hub
    name: str
    commit: str
    folder: Path
    local_dir: Path | None = None

    def job(self, entry: FileEntry, *, known: FileEntry | None = None, force: bool = False) -> Job:
        """What has to be done for a file, judged by presence and size; its bytes are compared later, unless `known`
        is what an earlier run found under the same hash."""
        path = self.folder / entry.path
        if force or (path.is_file() and path.stat().st_size != entry.size):
            return Job(entry=entry, fetch=True, replace=path.exists(), bytes=entry.size)
        if path.is_file():
            same = known is not None and (known.size, known.etag) == (entry.size, entry.etag)
            return Job(entry=known if known and same else entry, settled=same)
        blob = self.hub.blob(self.name, entry)
        cached = self.local_dir is None and blob.is_file() and blob.stat().st_size == entry.size
        return Job(entry=entry, fetch=True, bytes=0 if cached else entry.size)


def transfer(target: Target, jobs: Sequence[Job], progress: Progress) -> tuple[list[FileEntry], list[Fault]]:
    """Settle all jobs, several at a time. Returns the files with their sha256, and a fault for each file that arrived
    twice with other bytes than the hub lists (such a file is removed again).

    Raises DzError when files could not be fetched; those that could stay, so that the next run goes on from there."""
    run = _Run(target, progress)
    run.done += [j.entry for j in jobs if j.settled]
    todo = [j for j in jobs if not j.settled]
    for word, part in (("fetch", [j for j in todo if j.fetch]), ("check", [j for j in todo if not j.fetch])):
        if part:
            total = sum(j.bytes if j.fetch else j.entry.size for j in part)
            progress.start(f"{word} {len(part)} files", total=total, unit="B")
            run.all(part)
            progress.finish(f"{total:,} bytes")
    return sorted(run.done, key=lambda f: f.path), sorted(run.faults, key=lambda f: f.file)


class _Run:
    """The shared state of one transfer's threads."""

    def __init__(self, target: Target, progress: Progress) -> None:
        self.target, self.progress = target, progress
        self.done: list[FileEntry] = []
        self.faults: list[Fault] = []
        self.stop = threading.Event()
        self._lock = threading.Lock()

    def all(self, jobs: Sequence[Job]) -> None:
        pool = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="fetch")
        futures: dict[Future[None], Job] = {pool.submit(self.settle, job): job for job in jobs}
        try:
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
                if any(_hopeless(f.exception()) for f in finished if not f.cancelled()):
                    break
        finally:
            if not all(f.done() for f in futures):  # a hopeless error, or Ctrl-C: end transfers at their next chunk
                self.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        failed = [(job, e) for f, job in futures.items() if not f.cancelled() and (e := f.exception()) is not None]
        _raise(failed, len(jobs), self.target)

    def settle(self, job: Job) -> None:
        """Fetch if need be, compare, and fetch once more if the bytes differ."""
        path, fetch, fetched = self.target.folder / job.entry.path, job.fetch, 0
        while True:
            if fetch:
                self._download(job, force=job.replace or fetched > 0 or not job.fetch)
                fetched += 1
            sha256, wrong = compare(path, job.entry, self._reading(count=not job.fetch and not fetched))
            if not wrong:
                with self._lock:
                    self.done.append(replace(job.entry, sha256=sha256))
                return
            if fetched == 2:
                _discard(path)
                text = f"{wrong}; it came so twice and was removed"
                with self._lock:
                    self.faults.append(Fault(file=job.entry.path, code="wrong_bytes", text=text))
                return
            with self._lock:
                self.progress.note(f"{job.entry.path}: {wrong}; fetching it again")
            fetch = True

    def _download(self, job: Job, *, force: bool) -> None:
        if self.stop.is_set():
            raise Stopped
        self.target.hub.download(
            self.target.name,
            self.target.commit,
            job.entry.path,
            local_dir=self.target.local_dir,
            force=force,
            bar=bar_class(self._counted(job.fetch and job.bytes > 0), self.stop),
        )

    def _counted(self, count: bool) -> Callable[[int], None]:
        def advance(n: int) -> None:
            if count:
                with self._lock:
                    self.progress.advance(n)

        return advance

    def _reading(self, *, count: bool) -> Callable[[int], None]:
        advance = self._counted(count)

        def read(n: int) -> None:
            if self.stop.is_set():
                raise Stopped
            advance(n)

        return read


def _discard(path: Path) -> None:
    """Remove a file that this run wrote, and the cache's content behind the link."""
    content = path.resolve()
    path.unlink(missing_ok=True)
    content.unlink(missing_ok=True)


def _hopeless(exc: BaseException | None) -> bool:
    return isinstance(exc, DzError) and exc.code in _HOPELESS


def _raise(failed: list[tuple[Job, BaseException]], of: int, target: Target) -> None:
    """One error for all files that could not be fetched; what is not a DzError is raised as it is."""
    causes: dict[str, DzError] = {}
    for job, e in failed:
        if isinstance(e, DzError):
            causes[job.entry.path] = e
        elif not isinstance(e, Stopped):
            raise e
    if not causes:
        return
    first = next((e for e in causes.values() if _hopeless(e)), next(iter(causes.values())))
    more = f" and {len(causes) - 3} more" if len(causes) > 3 else ""
    what = f"{len(causes)} of {of} files of {target.name} could not be fetched: {', '.join(list(causes)[:3])}{more}"
    raise type(first)(what, first.why, first.next, code=first.code) from first
