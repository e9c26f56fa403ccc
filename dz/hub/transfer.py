"""Bytes from the hub to the disk: what is there is kept, and every file is compared with the hub's hash."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dz.core.index import Fault
from dz.core.protocols import Progress
from dz.core.source import FileEntry
from dz.hub.bar import Stopped, bar_class
from dz.hub.client import Hub
from dz.hub.digest import compare
from dz.hub.partial import have, part_beside, resumable
from dz.hub.pool import run_all
from dz.hub.stamp import NOTES


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
        there = have(self.part(entry), entry) if resumable(entry) else 0
        return Job(entry=entry, fetch=True, bytes=0 if self.cached(entry) else entry.size - there)

    def cached(self, entry: FileEntry) -> bool:
        """Whether the client's cache has the content under another revision, so that it only has to be linked."""
        blob = self.placed(entry)
        return self.local_dir is None and blob.is_file() and blob.stat().st_size == entry.size

    def placed(self, entry: FileEntry) -> Path:
        """Where a file's bytes are once it is whole: in the folder, or behind the cache's link."""
        return self.local_dir / entry.path if self.local_dir else self.hub.blob(self.name, entry)

    def part(self, entry: FileEntry) -> Path:
        """Where a large file grows until it is whole and right."""
        notes = self.local_dir / NOTES / entry.path if self.local_dir else self.hub.blob(self.name, entry)
        return part_beside(notes, entry)

    def place(self, entry: FileEntry) -> None:
        """Put a part that is whole where the file belongs, as the hub client would have."""
        if self.local_dir is None:
            self.part(entry).replace(self.placed(entry))
        else:
            self.placed(entry).parent.mkdir(parents=True, exist_ok=True)
            self.part(entry).replace(self.placed(entry))
            note = self.local_dir / NOTES / f"{entry.path}.metadata"
            note.write_text(f"{self.commit}\n{entry.etag}\n{time.time()}\n", "utf-8")


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
        run_all({j.entry.path: partial(self.settle, j) for j in jobs}, self.stop, self.target.name)

    def settle(self, job: Job) -> None:
        """Fetch if need be, compare, and fetch once more if the bytes differ."""
        fetch, fetched = job.fetch, 0
        path = self.target.folder / job.entry.path
        while True:
            if fetch:
                path = self._download(job, force=job.replace or fetched > 0 or not job.fetch, again=fetched > 0)
                fetched += 1
            sha256, wrong = compare(path, job.entry, self._reading(count=not job.fetch and not fetched))
            if not wrong:
                if path == self.target.part(job.entry):
                    self.target.place(job.entry)
                    self._client(job, force=False)  # which links it, or finds it there
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

    def _download(self, job: Job, *, force: bool, again: bool) -> Path:
        """Where the bytes are now: the part of a large file, or the file. `again`: what came before was wrong."""
        entry, target = job.entry, self.target
        if not resumable(entry) or (target.cached(entry) and not force):
            return self._client(job, force=force)
        part = target.part(entry)
        if again:
            part.unlink(missing_ok=True)
        placed = None if force else target.placed(entry)
        bar = self._bar(job, have(part, entry))
        if not target.hub.download_part(
            target.name, target.commit, entry, part, placed=placed, stop=self.stop, bar=bar
        ):
            return self._client(job, force=force)
        if part.is_file() and part.stat().st_size == entry.size:
            return part
        part.unlink(missing_ok=True)  # another process completed the file
        return self._client(job, force=False)

    def _client(self, job: Job, *, force: bool) -> Path:
        target = self.target
        target.hub.download(
            target.name,
            target.commit,
            job.entry.path,
            local_dir=target.local_dir,
            force=force,
            bar=self._bar(job, 0),
        )
        return target.folder / job.entry.path

    def _bar(self, job: Job, there: int) -> type:
        if self.stop.is_set():
            raise Stopped
        return bar_class(self._counted(job.fetch and job.bytes > 0), self.stop, there=there)

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
