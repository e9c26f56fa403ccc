"""From MODEL to a Source, through the lock alone: no network, no torch."""

from __future__ import annotations

from pathlib import Path

from dz.core.source import Source
from dz.core.workspace import root
from dz.errors import Refused, UsageError
from dz.hub import lock as locks
from dz.hub.local import register
from dz.hub.lock import Lock
from dz.hub.names import Model, near, parse
from dz.hub.pin import ambiguous, matching
from dz.hub.remote_code import refuse_no_pin


def resolve(model: str, *, workspace: Path | None = None, headers: bool = False, trust: bool = False) -> Source:
    """The source that MODEL names. `org/name[@rev]` is found by its lock; a folder is checked and locked on the fly,
    and gets a new rev8 when its configuration, code or headers changed.

    `headers` is for who needs no weights: a source of which only the headers were fetched will do. `trust` is for who
    runs its code: a folder's must be that which `dz fetch` registered.

    Raises UsageError for what was never fetched and when several locks fit, Refused when the files are not those that
    were checked, and for a source of headers alone."""
    return resolve_lock(model, workspace=workspace, headers=headers, trust=trust).source


def resolve_lock(model: str, *, workspace: Path | None = None, headers: bool = False, trust: bool = False) -> Lock:
    """As `resolve`, with everything that the lock holds."""
    wanted = parse(model)
    if wanted.path is not None:
        twin = locks.of_name(model, workspace) if "/" in model and not model.startswith((".", "/", "~")) else []
        if twin:
            raise UsageError(
                f"{model} is a fetched repository and a folder here",
                "dz does not guess which one is meant",
                f"./{model} for the folder, {twin[0].label} for the repository",
                code="ambiguous_model",
            )
        lock = register(wanted, workspace)[0]
        if trust and lock.source.code_hash:
            refuse_no_pin(model, lock, workspace)
        return lock
    lock = the_lock(wanted, workspace)
    locks.refuse_broken(lock, lock.broken, f"{lock.again}: it fetches these alone again")
    _refuse_changed(lock)
    if lock.source.headers and not headers:
        raise Refused(
            f"{lock.label} has no weights here, only their headers",
            f"it was fetched with --metadata: {len(lock.weights.shards)} weight files ({lock.weights.bytes:,} bytes of "
            "tensors) are on the hub alone; that is enough for `dz adapt MODEL --dry-run`",
            f"dz fetch {lock.label}",
            code="headers_only",
        )
    return lock


def the_lock(wanted: Model, workspace: Path | None = None) -> Lock:
    """The one lock that a repository's name and revision mean. Raises UsageError where there is none, or several."""
    found = locks.of_name(wanted.name, workspace)
    fitting = matching(found, wanted.revision)
    if not fitting:
        raise _unknown(wanted, found, workspace)
    if len(fitting) > 1:
        raise ambiguous(wanted, fitting)
    return fitting[0]


def _refuse_changed(lock: Lock) -> None:
    changed = lock.changed()
    if changed:
        more = f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise Refused(
            f"{lock.label} changed since it was fetched: {len(changed)} of {len(lock.source.files)} files",
            "; ".join(changed[:5]) + more,
            lock.again,
            code="changed",
        )


def _unknown(wanted: Model, found: list[Lock], workspace: Path | None) -> UsageError:
    base = workspace or root()
    close = near(wanted.name, locks.names(base))
    if found:
        why = f"locked are {', '.join(k.label for k in found)}"
    elif close:
        why = f"no lock of that name in {base}; near it: {', '.join(close)}"
    else:
        why = f"no lock of that name in {base}"
    return UsageError(f"{wanted.text} is not fetched", why, f"dz fetch {wanted.text}", code="not_fetched")
