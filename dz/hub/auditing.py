"""`dz fetch --verify`: what is on the disk, byte by byte, against everything that is known about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dz.core import jsonio
from dz.core.envelope import envelope
from dz.core.index import Fault, is_weight
from dz.core.protocols import Progress, Silent
from dz.core.source import FileEntry
from dz.core.workspace import root
from dz.hub import lock as locks
from dz.hub.again import digests, recheck
from dz.hub.digest import hashable
from dz.hub.known import commits, leftovers, recorded
from dz.hub.local import register, source_of
from dz.hub.lock import Lock
from dz.hub.lookup import the_lock
from dz.hub.names import Model, parse
from dz.hub.stamp import decides, listing, stamps
from dz.hub.verify import Findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What `dz fetch --verify` found. `compared` files had a hash to compare with, `read` counts all bytes that were
    read; `recorded` files had none, and theirs is in the lock from now on."""

    label: str
    folder: str
    commit: str
    files: int
    compared: int
    read: int
    recorded: int = 0
    tensors: int = 0
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    lock: Lock = field(repr=False)
    findings: Findings = field(repr=False)

    def document(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The `dz.fetch/1` document of a verification that found nothing wrong."""
        data = jsonio.to_builtins({k: getattr(self, k) for k in self.__slots__ if k not in ("lock", "findings")})
        return envelope("fetch", data, inputs=inputs, status="verified", reasons=list(self.notes))

    def refuse(self) -> None:
        """Raise one refusal with all faults, if there are any."""
        names = {f.file for f in self.faults}
        if self.commit:
            next = f"{self.lock.again}: of {self.files} files it fetches {len(names)} again"
        else:
            next = f"mend or fetch these files again; if they are meant to be so: dz fetch {self.folder} --force"
        replace(self.findings, faults=self.faults).refuse(self.label, next)


def audit(
    model: str, revision: str | None = None, *, workspace: Path | None = None, progress: Progress | None = None
) -> Audit:
    """Check a fetched model or a folder: presence, sizes, headers, index both ways, LFS pointers, every byte against
    the sha256 of the lock (or, for a folder, of the hub client's own notes), files of another commit, and what else
    lies there. What is found broken is noted in the lock, so that nothing uses it and `dz fetch` mends it.

    Raises UsageError for what was never fetched; what is wrong is in the answer."""
    progress = progress or Silent()
    wanted = parse(model, revision)
    lock, stored = _lock(wanted, workspace)
    source = lock.source
    found = recheck(lock, progress=progress)
    known = {f.file for f in found.faults}
    sha256, wrong = digests(source, [f for f in source.files if f.path not in known], progress)
    mixed = [] if source.commit else _mixed(source.path, source.files, found)
    faults = (*found.faults, *wrong, *mixed)
    here = [f for f in source.files if not source.header_only(f.path)]
    news = [f.path for f in here if not f.sha256 and f.path in sha256]
    if stored or not faults:
        _note(lock, stored, sha256, faults, workspace)
    return Audit(
        label=lock.label,
        folder=source.folder,
        commit=source.commit,
        files=len(source.files),
        compared=sum(hashable(f) for f in here),
        read=sum(f.size for f in here if f.path in sha256),
        recorded=0 if faults else len(news),
        tensors=found.tensors,
        faults=faults,
        notes=(*found.notes, *_strays(lock, workspace, sha256), *_leftovers(source.path)),
        lock=lock,
        findings=found,
    )


def _lock(wanted: Model, workspace: Path | None) -> tuple[Lock, bool]:
    """(what is known about a model, whether a lock holds it): for a folder the newest lock that names it, or the hub
    client's notes."""
    if wanted.path is None:
        return the_lock(wanted, workspace), True
    at = locks.of_place(wanted.path, workspace)
    if at:
        return at[0], True
    paths = listing(wanted.path, skip=workspace or root())
    source = source_of(wanted.path, paths)
    return Lock(source=replace(source, files=recorded(wanted.path, source.files))), False


def _note(lock: Lock, stored: bool, sha256: dict[str, str], faults: Sequence[Fault], workspace: Path | None) -> None:
    """Write into the lock what was found: the broken files, or the hashes and the times of the whole."""
    ours = {f.path for f in lock.source.files}
    if faults:
        broken = tuple(sorted({f.file for f in faults if f.file in ours}))
        # as they were when they were read: only a later write makes another file of a broken one
        read = {p: t for p, t in stamps(lock.source).items() if p in broken}
        locks.rewrite(replace(lock, broken=broken, stamps={**lock.stamps, **read}), workspace)
        return
    if not stored:
        model = Model(name=lock.source.name, path=lock.source.path)
        lock, _ = register(model, workspace)
    files = tuple(replace(f, sha256=f.sha256 or sha256.get(f.path, "")) for f in lock.source.files)
    source = replace(lock.source, files=files)
    locks.rewrite(replace(lock, source=source, broken=(), stamps=stamps(source)), workspace)


def _mixed(folder: Path, files: Sequence[FileEntry], found: Findings) -> list[Fault]:
    """Files that decide something and are of another commit than most, by the hub client's notes."""
    counted = [f.path for f in files if f.path in found.layout.shards or decides(f.path)]
    by_file = commits(folder, counted)
    if len(set(by_file.values())) < 2:
        return []
    main, n = Counter(by_file.values()).most_common(1)[0]
    text = f"of commit {{}}, {n} of the {len(by_file)} files are of {main[:8]}"
    return [
        Fault(file=path, code="mixed_revision", text=text.format(commit[:8]))
        for path, commit in sorted(by_file.items())
        if commit != main
    ]


def _strays(lock: Lock, workspace: Path | None, sha256: dict[str, str]) -> list[str]:
    """What lies in the folder and is not in the lock; and which of it is a locked file once more."""
    source = lock.source
    known = {f.path: f for f in source.files}
    strays = [p for p in listing(source.path, skip=workspace or root()) if p not in known]
    if not strays:
        return []
    notes = []
    for path in strays:
        size = (source.path / path).stat().st_size if (source.path / path).is_file() else 0
        why = "weights that are not read" if is_weight(path) else "not in the lock"
        twin = _twin(lock, path, size, sha256) if size else ""
        notes.append(f"stray: {path} ({size:,} bytes): {f'the same bytes as {twin}' if twin else why}")
    shown = notes[:10]
    return [*shown, f"and {len(notes) - 10} more strays"] if len(notes) > 10 else shown


def _leftovers(folder: Path) -> list[str]:
    found = leftovers(folder)
    size = sum(p.stat().st_size for p in found)
    return (
        [f"left over from ended transfers: {len(found)} files ({size:,} bytes) in {found[0].parent}"] if found else []
    )


def _twin(lock: Lock, path: str, size: int, sha256: dict[str, str]) -> str:
    same = {sha256[f.path]: f.path for f in lock.source.files if f.size == size and f.path in sha256}
    if not same:
        return ""
    entry = FileEntry(path=path, size=size)
    found, _ = digests(replace(lock.source, headers=""), [entry], Silent())
    return same.get(found.get(path, ""), "")
