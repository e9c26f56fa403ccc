"""`dz fetch --metadata`: of the weight files the headers alone, kept in the workspace as each file's first bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dz.core.headers import Header, read_kept
from dz.core.index import Fault
from dz.core.protocols import Progress
from dz.core.source import FileEntry, Source
from dz.errors import Refused
from dz.hub.pool import run_all
from dz.hub.ranges import guess, prefix
from dz.hub.select import Selection
from dz.hub.stamp import decides
from dz.hub.transfer import Target


def narrow(chosen: Selection) -> tuple[Selection, tuple[FileEntry, ...]]:
    """(the selection without weights and without what decides nothing about the model, such as pictures; the weight
    files of which the header is wanted)."""
    shards = tuple(f for f in chosen.wanted if f.path in chosen.layout.shards)
    small = tuple(f for f in chosen.wanted if decides(f.path))
    rest = {f.path for f in chosen.wanted} - {f.path for f in (*shards, *small)}
    return replace(chosen, wanted=small, left_out=chosen.left_out | rest), shards


@dataclass(frozen=True, slots=True)
class Headers:
    """What `keep` did: the headers by file, and what is wrong with the others."""

    by_file: dict[str, Header] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def read(self, path: str) -> Header:
        """The header of a file. Raises FileNotFoundError where there is none."""
        try:
            return self.by_file[path]
        except KeyError:
            raise FileNotFoundError(path) from None


def sizes(shards: Sequence[FileEntry], chosen: Selection) -> dict[str, int]:
    """Bytes to ask for at once of each file, by the tensors that the index places in it."""
    indexed = chosen.layout.by_shard()
    return {f.path: min(f.size, guess(indexed.get(f.path, ()))) for f in shards}


def keep(
    target: Target,
    source: Source,
    shards: Sequence[FileEntry],
    first: dict[str, int],
    progress: Progress,
    *,
    again: Collection[str] = (),
) -> Headers:
    """Fetch the headers of weight files, several at a time, to where `source.at` says. What is there and fits the
    listed size is kept, but for the files in `again`. A header that comes broken is fetched once more.

    Raises DzError when files could not be asked for; headers that came stay, and the next run goes on from there."""
    out, lock, stop = Headers(), threading.Lock(), threading.Event()

    def settle(entry: FileEntry) -> None:
        path = source.at(entry.path)
        header = None if entry.path in again else _kept(path, entry)
        found = header or _fetch(target, entry, path, first[entry.path])
        with lock:
            progress.advance()
            if isinstance(found, Fault):
                out.faults.append(found)
            else:
                out.by_file[entry.path] = found

    progress.start(f"headers of {len(shards)} weight files", total=len(shards), unit="files")
    run_all({f.path: partial(settle, f) for f in shards}, stop, target.name)
    progress.finish(f"of {sum(f.size for f in shards):,} bytes {sum(h.data_start for h in out.by_file.values()):,}")
    out.faults.sort(key=lambda f: f.file)
    return out


def _kept(path: Path, entry: FileEntry) -> Header | None:
    try:
        return read_kept(path, entry.size, entry.path)
    except (FileNotFoundError, Refused):
        return None


def _fetch(target: Target, entry: FileEntry, path: Path, first: int) -> Header | Fault:
    try:
        return _once(target, entry, path, first)
    except Refused:
        pass  # said below if it comes so twice
    try:
        return _once(target, entry, path, first)
    except Refused as e:
        path.unlink(missing_ok=True)
        return Fault(file=entry.path, code=e.code, text=e.why)


def _once(target: Target, entry: FileEntry, path: Path, first: int) -> Header:
    _write(path, prefix(_bytes_of(target, entry), entry.size, entry.path, first))
    return read_kept(path, entry.size, entry.path)


def _bytes_of(target: Target, entry: FileEntry) -> Callable[[int, int], bytes]:
    """`get(begin, end)` for a file: from the disk where it is there in its size, from the hub otherwise."""
    here = target.folder / entry.path
    if not here.is_file() or here.stat().st_size != entry.size:
        return lambda begin, end: target.hub.range(target.name, target.commit, entry.path, begin, end, entry.size)

    def read(begin: int, end: int) -> bytes:
        with here.open("rb") as f:
            f.seek(begin)
            return f.read(end - begin)

    return read


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(raw)
    part.replace(path)
