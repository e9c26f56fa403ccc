"""The lock: what was fetched, at which commit, with which hashes. One `fetch.json` for each model and revision."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dz.core import jsonio
from dz.core.source import FileEntry, Source
from dz.core.workspace import Workspace, root
from dz.errors import Refused, UsageError
from dz.hub.verify import Findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A file of the repository that was not fetched or is not read, its size in bytes, and why."""

    path: str
    size: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the headers say: the index that was followed (empty: none), weight files, tensors, and their bytes."""

    index: str = ""
    shards: tuple[str, ...] = ()
    tensors: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The data of `fetch.json`. `requested` is the branch, tag or commit that was asked for (empty for a folder);
    `local_dir` says that the files were put into a folder of the user's choice, not into the client's cache;
    `complete` says that every weight file that the index names is there and right; `hashed` that every file was
    compared with the hub's hash; `foreign_code` are other repositories whose code an `auto_map` names; `stamps` are
    modification times in microseconds, by which a changed file is noticed without reading it; `include` and `exclude`
    are the globs it was fetched with; `broken` are the files that `dz fetch --verify` found broken: nothing uses the
    source until they are mended; `pinned` says that the user registered a folder, so that its code may run under
    trust (a commit is a pin by itself)."""

    source: Source
    requested: str = ""
    endpoint: str = ""
    local_dir: bool = False
    complete: bool = True
    hashed: bool = False
    weights: Weights = field(default_factory=Weights)
    foreign_code: tuple[str, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    notes: tuple[str, ...] = ()
    stamps: dict[str, int] = field(default_factory=dict)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    pinned: bool = False

    @property
    def label(self) -> str:
        """`org/name@rev8`, which picks this lock among several; a folder's path."""
        return f"{self.source.name}@{self.source.rev8}" if self.source.commit else self.source.name

    @property
    def again(self) -> str:
        """The command that makes the source whole again."""
        return f"dz fetch {self.label}{' --metadata' if self.source.headers else ''}"

    def changed(self) -> list[str]:
        """What differs on disk from the lock, one finding for each file, without reading a file's content."""
        return [found for f in self.source.files if (found := self._differs(f))]

    def differs(self, path: str) -> str:
        """What differs from the lock for one of its files, without reading its content; empty: nothing."""
        return next((self._differs(f) for f in self.source.files if f.path == path), f"{path} is not in the lock")

    def spoilt(self) -> list[str]:
        """The files that are gone, were written to after they were checked, or were found broken."""
        return [f.path for f in self.source.files if f.path in self.broken or self._differs(f)]

    def unchanged(self) -> dict[str, FileEntry]:
        """The files that are as they were when their bytes were compared with the hub's hashes."""
        here = [f for f in self.source.files if f.sha256 and not self.source.header_only(f.path)]
        return {f.path: f for f in here if f.path not in self.broken and not self._differs(f)}

    def _differs(self, f: FileEntry) -> str:
        try:
            now = self.source.at(f.path).stat()
        except FileNotFoundError:
            return f"{f.path} is gone"
        if now.st_size != f.size and not self.source.header_only(f.path):
            return f"{f.path} has {now.st_size:,} bytes, the lock says {f.size:,}"
        written = now.st_mtime_ns // 1000 != self.stamps.get(f.path)
        return f"{f.path} was written to after it was checked" if written else ""


def refuse_broken(lock: Lock, files: Sequence[str], next: str) -> None:
    """Raise Refused for files that a verification found broken, if there are any."""
    if files:
        raise Refused(
            f"{lock.label} has files that `dz fetch --verify` found broken",
            ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else ""),
            next,
            code="broken_files",
        )


def weights_of(findings: Findings) -> Weights:
    """What a check of a folder counted."""
    layout = findings.layout
    return Weights(index=layout.index, shards=layout.shards, tensors=findings.tensors, bytes=findings.bytes)


def write(lock: Lock, base: Path | None = None, *, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write the lock into its workspace under `base`; returns the document."""
    space = Workspace.of(lock.source, base)
    return space.write(space.fetch, "fetch", lock, **envelope_of(lock, inputs))


def envelope_of(lock: Lock, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The parts of the envelope that a lock decides: inputs, status ("ok" or "partial") and reasons."""
    return {"inputs": inputs or {}, "status": "ok" if lock.complete else "partial", "reasons": list(lock.notes)}


def read(path: Path) -> Lock:
    """The lock in a `fetch.json`. Raises UsageError when it is not one."""
    document = jsonio.read(path)
    if not isinstance(document, dict) or document.get("schema") != "dz.fetch/1":
        raise UsageError(f"{path} is not a lock", "its schema is not dz.fetch/1", "delete it and fetch again")
    return jsonio.from_builtins(Lock, document.get("data"), where=str(path))


def of_name(name: str, base: Path | None = None) -> list[Lock]:
    """The locks of one repository, newest first."""
    return [lock for lock in _all(f"{name.replace('/', '--')}@*", base) if lock.source.name == name]


def of_folder(source: Source, base: Path | None = None) -> Lock | None:
    """The lock that names the same folder at the same revision, if there is one."""
    path = Workspace.of(source, base).fetch
    lock = read(path) if path.is_file() else None
    return lock if lock and lock.source.folder == source.folder and lock.source.name == source.name else None


def of_folder_name(folder: Path, base: Path | None = None) -> list[Lock]:
    """The locks of a folder that was registered in place, whatever was in it, newest first."""
    return [k for k in _all(f"{glob.escape(folder.name)}@*", base) if k.source.path == folder and not k.source.commit]


def of_place(folder: Path, base: Path | None = None) -> list[Lock]:
    """Every lock whose files lie in this folder, newest first: fetched ones before those of the folder as such."""
    found = [k for k in _all("*@*", base) if k.source.path.resolve() == folder.resolve()]
    return sorted(found, key=lambda k: not k.source.commit)


def _all(pattern: str, base: Path | None) -> list[Lock]:
    found = sorted((base or root()).glob(f"{pattern}/fetch.json"), key=lambda p: p.stat().st_mtime_ns)
    return [read(p) for p in reversed(found)]


def rewrite(lock: Lock, base: Path | None = None) -> None:
    """Write a lock in place of the one that is there; what was asked for at its making stays as it is."""
    path = Workspace.of(lock.source, base).fetch
    write(lock, base, inputs=jsonio.read(path)["inputs"])


def names(base: Path | None = None) -> list[str]:
    """The repositories that have a lock, by the names of their workspaces."""
    folder = base or root()
    found = {p.parent.name.rpartition("@")[0] for p in folder.glob("*@*/fetch.json")}
    return sorted(n.replace("--", "/", 1) for n in found)
