"""What the hub client's cache already holds, for offline mode: commits by its refs, hashes by its blob names.

The layout is the documented one: `refs/<branch>` holds a commit; `snapshots/<commit>/` links to `blobs/<etag>`, and an
etag is a sha256 for large files and git's blob id for the others."""

from __future__ import annotations

import re
from pathlib import Path

from dz.core.source import FileEntry
from dz.hub.stamp import listing

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(repository: Path, revision: str) -> str | None:
    """The commit that a branch, tag or full commit stands for in the cache, if its snapshot is there."""
    commit = revision
    if not _COMMIT.fullmatch(revision):
        ref = repository / "refs" / revision
        commit = ref.read_text("utf-8").strip() if ref.is_file() else ""
    found = bool(_COMMIT.fullmatch(commit)) and (repository / "snapshots" / commit).is_dir()
    return commit if found else None


def entries(snapshot: Path) -> list[FileEntry]:
    """The files of a snapshot, with the hash that the name of each blob is; none where the cache has no links."""
    out = []
    for path in listing(snapshot):
        full = snapshot / path
        etag = full.resolve().name if full.is_symlink() else ""
        sha = etag if _SHA256.fullmatch(etag) else ""
        out.append(FileEntry(path=path, size=full.stat().st_size if full.is_file() else 0, sha256=sha, etag=etag))
    return out
