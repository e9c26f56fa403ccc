"""A locked source checked again: files, index and headers, and when asked every byte against its sha256."""

from __future__ import annotations

from dataclasses import replace

from dz.core.index import Fault
from dz.core.protocols import Progress, Silent
from dz.hub.digest import compare
from dz.hub.lock import Lock
from dz.hub.verify import Findings, examine


def recheck(lock: Lock, *, deep: bool = False, progress: Progress | None = None) -> Findings:
    """Everything that is wrong with the files of a lock now. `deep` reads every file that has a hash.

    Nothing is refused and nothing repaired: `Findings.refuse` does the one, `dz fetch` the other."""
    progress = progress or Silent()
    files, folder = lock.source.files, lock.source.path
    paths = [f.path for f in files]
    left_out = () if lock.complete else set(lock.weights.shards) - set(paths)
    found = examine(folder, paths, left_out=left_out, progress=progress)
    known = {f.file for f in found.faults}
    faults = [Fault(file=p, code="missing_file", text="gone") for p in paths if not (folder / p).is_file()]
    faults = [f for f in faults if f.file not in known]
    known |= {f.file for f in faults}
    hashed = [f for f in files if f.sha256 and f.path not in known] if deep else []
    progress.start(f"check {len(hashed)} files", total=sum(f.size for f in hashed), unit="B")
    for f in hashed:
        _, wrong = compare(folder / f.path, f, progress.advance)
        if wrong:
            faults.append(Fault(file=f.path, code="wrong_bytes", text=wrong))
    progress.finish()
    return replace(found, faults=(*found.faults, *faults))
