"""A file's bytes against the hashes that the hub lists."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from dz.core.source import FileEntry

_GIT = re.compile(r"[0-9a-f]{40}")
_CHUNK = 4 << 20  # bytes


def hashable(entry: FileEntry) -> bool:
    """Whether the hub gave a hash for the file."""
    return bool(entry.sha256 or _GIT.fullmatch(entry.etag))


def compare(path: Path, entry: FileEntry, advance: Callable[[int], None] = lambda n: None) -> tuple[str, str]:
    """(sha256 of the file, what is wrong with it or ""). Size first, then the hub's sha256, or git's blob id.

    `advance` is told the bytes read. A blob id is the sha1 of "blob SIZE\\0" and the content (git's object format)."""
    size = path.stat().st_size
    if size != entry.size:
        return "", f"{size:,} bytes, it should have {entry.size:,}"
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    by_blob = not entry.sha256 and bool(_GIT.fullmatch(entry.etag))
    with path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            sha256.update(chunk)
            if by_blob:
                blob.update(chunk)
            advance(len(chunk))
    found = sha256.hexdigest()
    if entry.sha256 and found != entry.sha256:
        return found, f"sha256 {found[:16]}..., it should be {entry.sha256[:16]}..."
    if by_blob and blob.hexdigest() != entry.etag:
        return found, f"git blob {blob.hexdigest()[:16]}..., it should be {entry.etag[:16]}..."
    return found, ""
