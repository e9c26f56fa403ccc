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
    folder; `rev8` names the workspace; `code_hash` covers the repository's Python files (empty if it has none).
    `headers` is set when the weights were not fetched: the folder that keeps the header of each weight file, whose
    `size` in `files` is then that of the whole file on the hub."""

    name: str
    folder: str
    commit: str
    rev8: str
    code_hash: str
    files: tuple[FileEntry, ...]
    headers: str = ""

    @property
    def path(self) -> Path:
        """The folder as a path."""
        return Path(self.folder)

    def header_only(self, path: str) -> bool:
        """Whether of this file only the header is here."""
        return bool(self.headers) and path.endswith(".safetensors")

    def at(self, path: str) -> Path:
        """Where a file of this source lies; for a weight file of which only the header is here, where that lies."""
        return Path(self.headers) / f"{path}.header" if self.header_only(path) else self.path / path

    @property
    def workspace_name(self) -> str:
        """`<org>--<name>@<rev8>`; a local folder goes by its last part."""
        local = self.name.startswith(("/", "."))
        base = Path(self.name).name if local else self.name.replace("/", "--")
        return f"{base}@{self.rev8}"
