"""integrity: every file of the lock, headers and index both ways, and the bytes against their hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dz.accept.check import Check, failed, passed
from dz.core.check import Result

if TYPE_CHECKING:
    from dz.accept.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """`deep` reads every file that has a hash in the lock; without it sizes, headers and the index are compared."""

    deep: bool = True


def run(ctx: Context, params: Params) -> Result:
    """See the module."""
    from dz import hub

    found = hub.recheck(ctx.lock, deep=params.deep, progress=ctx.progress)
    files = ctx.lock.source.files
    hashed = sum(bool(f.sha256) for f in files) if params.deep else 0
    figures = f"{len(files)} files, {found.tensors:,} tensors in {len(found.layout.shards)} weight files"
    figures += f", {hashed} compared with their sha256" if params.deep else ""
    faults = [f"{f.file}: {f.text}" for f in found.faults]
    if not found.layout.shards:
        faults.append("there are no weight files")
    details = {"faults": faults, "notes": found.notes, "bytes": found.bytes, "ignored": found.layout.ignored}
    make = failed if faults else passed
    return make(
        "; ".join([*faults[:4], figures]), value=len(faults), unit="faults", threshold=0, n=len(files), details=details
    )


CHECK = Check(
    id="integrity", summary="The files against the lock, the index and the headers, both ways.", params=Params, run=run
)
