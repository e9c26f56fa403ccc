"""A locked source checked again: files, index and headers, and when asked every byte against its sha256."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dz.core.headers import source_header
from dz.core.index import Fault
from dz.core.protocols import Progress, Silent
from dz.core.source import FileEntry, Source
from dz.hub.digest import compare
from dz.hub.lock import Lock
from dz.hub.pool import run_all
from dz.hub.verify import Findings, examine


def recheck(lock: Lock, *, deep: bool = False, progress: Progress | None = None) -> Findings:
    """Everything that is wrong with the files of a lock now. `deep` reads every file that has a hash.

    Nothing is refused and nothing repaired: `Findings.refuse` does the one, `dz fetch` the other."""
    progress = progress or Silent()
    found = _shallow(lock, progress)
    if not deep:
        return found
    known = {f.file for f in found.faults}
    hashed = [f for f in lock.source.files if f.sha256 and f.path not in known]
    _, wrong = digests(lock.source, hashed, progress)
    return replace(found, faults=(*found.faults, *wrong))


def _shallow(lock: Lock, progress: Progress) -> Findings:
    """Presence, sizes, headers, index, LFS pointers: no data of the weights is read. One finding for each file that is
    gone or has another size than the lock says, unless a header tells more precisely."""
    source = lock.source
    paths = [f.path for f in source.files]
    left_out = () if lock.complete else set(lock.weights.shards) - set(paths)
    found = examine(
        source.path, paths, left_out=left_out, header=lambda shard: source_header(source, shard), progress=progress
    )
    known = {f.file for f in found.faults}
    more = [fault for f in source.files if f.path not in known and (fault := _size_fault(source, f))]
    return replace(found, faults=(*found.faults, *more))


def _size_fault(source: Source, f: FileEntry) -> Fault | None:
    path = source.at(f.path)
    if not path.is_file():
        return Fault(file=f.path, code="missing_file", text="gone")
    size = path.stat().st_size
    if size != f.size and not source.header_only(f.path):
        return Fault(file=f.path, code="wrong_size", text=f"{size:,} bytes, it should have {f.size:,}")
    return None


def digests(source: Source, files: list[FileEntry], progress: Progress) -> tuple[dict[str, str], list[Fault]]:
    """(the sha256 of each file, what is wrong with the others), several files at a time. A file of which only the
    header is here has no bytes to compare and is passed over."""
    sha256: dict[str, str] = {}
    faults: list[Fault] = []
    lock = threading.Lock()

    def advance(n: int) -> None:
        with lock:
            progress.advance(n)

    def settle(f: FileEntry) -> None:
        found, wrong, code = _compared(source, f, advance)
        with lock:
            if wrong:
                faults.append(Fault(file=f.path, code=code, text=wrong))
            else:
                sha256[f.path] = found

    here = [f for f in files if not source.header_only(f.path)]
    progress.start(f"check {len(here)} files", total=sum(f.size for f in here), unit="B")
    run_all({f.path: partial(settle, f) for f in here}, threading.Event(), source.name)
    progress.finish()
    return sha256, sorted(faults, key=lambda f: f.file)


def _compared(source: Source, f: FileEntry, advance: Callable[[int], None]) -> tuple[str, str, str]:
    try:
        return *compare(source.at(f.path), f, advance), "wrong_bytes"
    except OSError as e:  # a disk that cannot give the bytes back is a finding about this file
        return "", f"it cannot be read: {e.strerror or e}", "unreadable"
