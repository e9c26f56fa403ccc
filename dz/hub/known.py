"""What the hub client noted about the files of a folder: the commit and the hash of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dz.core.source import FileEntry
from dz.hub import cached
from dz.hub.stamp import NOTES, PENDING

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")


def commits(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """The commit of each file that has a note (folders fetched with a local dir)."""
    found = ((path, _note(folder, path)) for path in paths)
    return {path: lines[0] for path, lines in found if lines and _GIT.fullmatch(lines[0])}


def recorded(folder: Path, files: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """The files with the hashes that the client recorded: in its notes, or as the names of the cache's blobs."""
    blobs = {f.path: f.etag for f in cached.entries(folder)} if folder.parent.name == "snapshots" else {}
    return tuple(_with(f, blobs.get(f.path, "") or "".join(_note(folder, f.path)[1:2])) for f in files)


def leftovers(folder: Path) -> list[Path]:
    """What ended transfers left beside a folder's files: parts that a next fetch goes on with, or that nothing uses."""
    at = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder / NOTES
    return sorted(p for p in at.rglob(f"*{PENDING}") if p.is_file()) if at.is_dir() else []


def _with(entry: FileEntry, etag: str) -> FileEntry:
    if _SHA256.fullmatch(etag):
        return replace(entry, sha256=etag, etag=etag)
    return replace(entry, etag=etag) if _GIT.fullmatch(etag) else entry


def _note(folder: Path, path: str) -> list[str]:
    note = folder / NOTES / f"{path}.metadata"
    return [line.strip() for line in note.read_text("utf-8").splitlines()] if note.is_file() else []
