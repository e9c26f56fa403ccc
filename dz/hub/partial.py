"""A large file fetched into a part that outlives the process: the next run goes on where this one was ended.

The hub client gives up its own temporary file with the process. It is still what transfers a file here, and where it
knows a better way than plain ranges (Xet) the file is left to it altogether."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dz.core.source import FileEntry
from dz.hub.bar import Stopped
from dz.hub.stamp import PENDING

LARGE = 8 << 20  # bytes from which a file is worth a part of its own


def resumable(entry: FileEntry) -> bool:
    """Whether a file is fetched by parts: large, and with a sha256 that tells whether the parts fit together."""
    return bool(entry.sha256) and entry.size >= LARGE


def have(part: Path, entry: FileEntry) -> int:
    """Bytes of the file that an earlier run left; a part longer than the file counts as none."""
    size = part.stat().st_size if part.is_file() else 0
    return size if size <= entry.size else 0


def part_beside(path: Path, entry: FileEntry) -> Path:
    """The part of a file that will lie at `path`, or has its notes there. The hash is in the name: another revision of
    the file never goes on with this one's bytes."""
    return path.with_name(f"{path.name}.{entry.sha256[:16]}.dz{PENDING}")


@contextmanager
def opened(
    part: Path, entry: FileEntry, stop: threading.Event, placed: Path | None = None
) -> Iterator[tuple[BinaryIO, int]]:
    """(the part, open for appending and held against other processes; its bytes). Waits for who holds it already; a
    part that this one completed and moved on (to `placed`, if given) counts as whole.

    Raises Stopped when `stop` is set meanwhile."""
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as f:
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.is_set():
                    raise Stopped from None
                time.sleep(0.2)
        if not _is(f, part) or (placed and placed.is_file() and placed.stat().st_size == entry.size):
            # Another process was faster. The part that was opened may be the file itself now: never write into that.
            yield f, entry.size
            return
        there = have(part, entry)
        if not there:
            f.truncate(0)
        yield f, there


def _is(f: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(f.fileno()), path.stat())
    except FileNotFoundError:
        return False
