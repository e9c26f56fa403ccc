"""A local folder, registered in place: checked, and locked under the digest of what is in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dz.core.index import Fault, broken
from dz.core.protocols import Progress, Silent
from dz.core.source import FileEntry, Source
from dz.core.workspace import root
from dz.errors import UsageError
from dz.hub import lock as locks
from dz.hub.known import commits
from dz.hub.lock import Ignored, Lock
from dz.hub.names import Model
from dz.hub.remote_code import foreign_code
from dz.hub.stamp import code_digest, code_hash, listing, local_revision, stamps
from dz.hub.verify import examine


def register(
    model: Model,
    workspace: Path | None = None,
    *,
    progress: Progress | None = None,
    strict: bool = False,
    force: bool = False,
    pin: bool = False,
) -> tuple[Lock, bool]:
    """(the lock of a folder, whether it was there already and nothing changed). Nothing is copied. `pin` is for who
    means the folder as it is: its code may then run under trust.

    Raises Refused with every fault; `strict` also refuses a folder without weights, which is enough for a look at a
    configuration but cannot be served."""
    folder = model.path
    if folder is None:
        raise UsageError(f"{model.text} is no folder", "only a folder is registered in place", f"dz fetch {model.text}")
    paths = listing(folder, skip=workspace or root())
    if not paths:
        raise UsageError(f"{folder} is empty", "no file to register", "dz fetch org/name", code="empty_folder")
    irregular = [p for p in paths if (folder / p).exists() and not (folder / p).is_file()]
    if irregular:
        faults = [Fault(file=p, code="irregular", text="no regular file") for p in irregular]
        raise broken(str(folder), faults, "put files in their place")
    source = _remember(source_of(folder, paths), locks.of_folder_name(folder, workspace))
    known = locks.of_folder(source, workspace)
    if known and not force:
        _refuse_broken(known)
    if known and not force and _same(known, source) and (known.complete or not strict):
        return (known, True) if known.pinned or not pin else (_pinned(known, workspace), False)
    findings = examine(folder, paths, progress=progress or Silent())
    findings.refuse(str(folder), "mend or fetch these files again; `git lfs pull` if it is a clone")
    if strict and not findings.layout.shards:
        raise broken(str(folder), [Fault(file=".", code="no_weights", text="no weight files")], "fetch the weights too")
    lock = Lock(
        source=source,
        complete=findings.whole,
        weights=locks.weights_of(findings),
        foreign_code=foreign_code(folder, paths),
        ignored=tuple(
            Ignored(path=p, size=(folder / p).stat().st_size, why=why) for p, why in findings.layout.ignored.items()
        ),
        notes=(*findings.notes, *_mixed(folder, paths)),
        stamps=stamps(source),
        pinned=pin or bool(known and known.pinned),
    )
    locks.write(lock, workspace, inputs={"model": str(folder)})
    return lock, False


def _pinned(lock: Lock, workspace: Path | None) -> Lock:
    lock = replace(lock, pinned=True)
    locks.write(lock, workspace, inputs={"model": lock.source.folder})
    return lock


def source_of(folder: Path, paths: tuple[str, ...]) -> Source:
    """The source that a folder with these files is now; of its hashes only those of code are known."""
    files = tuple(FileEntry(path=p, size=_size(folder / p), sha256=code_digest(folder / p)) for p in paths)
    return Source(
        name=str(folder),
        folder=str(folder),
        commit="",
        rev8=local_revision(folder, paths),
        code_hash=code_hash(folder, (p for p in paths if (folder / p).is_file())),
        files=files,
    )


def _remember(source: Source, before: Sequence[Lock]) -> Source:
    """The source with the sha256 of each file that nobody wrote to since an earlier lock of the folder knew it."""
    known = {f.path: f for lock in reversed(before) for f in lock.unchanged().values()}

    def hashed(f: FileEntry) -> FileEntry:
        old = known.get(f.path)
        return old if old and old.size == f.size and not f.sha256 else f

    return replace(source, files=tuple(hashed(f) for f in source.files))


def _refuse_broken(lock: Lock) -> None:
    """What a verification found broken is refused until it is written to again."""
    still = [p for p in lock.broken if p in lock.stamps and not lock.differs(p)]
    then = f"mend or fetch these files again; if they are meant to be so: dz fetch {lock.label} --force"
    locks.refuse_broken(lock, still, then)


def _mixed(folder: Path, paths: Sequence[str]) -> list[str]:
    by_commit = Counter(commits(folder, paths).values())
    if len(by_commit) < 2:
        return []
    listed = ", ".join(f"{n} of {commit[:8]}" for commit, n in sorted(by_commit.items()))
    return [f"files of {len(by_commit)} different commits: {listed}"]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _same(lock: Lock, source: Source) -> bool:
    return lock.source == source and not lock.changed()
