"""A model repository on disk, as the lock pins it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the repository: path relative to the folder, size in bytes, sha256 where the hub gives it or it was
    computed (empty otherwise), and the blob id or etag."""

    path: str
    size: int
    sha256: str = ""
    etag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`name` is `org/name` or the absolute path; `folder` holds the files; `commit` is the hub's, empty for a local
    folder; `rev8` names the workspace; `code_hash` covers the repository's Python files (empty if it has none)."""

    name: str
    folder: str
    commit: str
    rev8: str
    code_hash: str
    files: tuple[FileEntry, ...]

    @property
    def path(self) -> Path:
        """The folder as a path."""
        return Path(self.folder)

    @property
    def workspace_name(self) -> str:
        """`<org>--<name>@<rev8>`; a local folder goes by its last part."""
        local = self.name.startswith(("/", "."))
        base = Path(self.name).name if local else self.name.replace("/", "--")
        return f"{base}@{self.rev8}"
