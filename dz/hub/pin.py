"""From what the user wrote to one commit: by a lock where one answers, by the hub otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dz.errors import UsageError
from dz.hub.client import Hub
from dz.hub.lock import Lock
from dz.hub.names import Model

_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A repository at a commit. `requested` is how it was asked for; `lock` is the one of this commit, if there is."""

    name: str
    commit: str
    requested: str
    lock: Lock | None = None
    notes: tuple[str, ...] = ()


def matching(found: Sequence[Lock], revision: str | None) -> list[Lock]:
    """The locks that a revision names: all without one; else by the commit's beginning, or by what was asked for."""
    if revision is None:
        return list(found)
    by_commit = [k for k in found if _COMMIT.fullmatch(revision) and k.source.commit.startswith(revision)]
    return by_commit or [k for k in found if k.requested == revision]


def ambiguous(model: Model, found: Sequence[Lock]) -> UsageError:
    """The refusal to pick one of several locks."""
    listed = ", ".join(f"{k.label} (asked for as {k.requested})" for k in found)
    return UsageError(
        f"{len(found)} revisions of {model.name} are locked, and {model.text} names none of them",
        f"newest first: {listed}",
        f"name one, such as {found[0].label}",
        code="ambiguous_revision",
    )


def pin(model: Model, hub: Hub, found: Sequence[Lock]) -> Pin:
    """The commit that is meant. Without a revision the lock decides, so that a rerun gives the same bytes although the
    branch moved on; a branch or tag that is named is looked up on the hub; a locked commit needs no look."""
    revision = model.revision
    locked = matching(found, revision)
    named = revision is not None and any(k.source.commit.startswith(revision) for k in locked)
    if revision is None or named or hub.offline:
        if len(locked) > 1:
            raise ambiguous(model, locked)
        if locked:
            lock = locked[0]
            return Pin(name=model.name, commit=lock.source.commit, requested=lock.requested, lock=lock)
    commit, now_called = hub.commit(model.name, revision or "main")
    notes = []
    if now_called != model.name:
        notes.append(f"{model.name} is called {now_called} now")
    before = [k for k in locked if k.source.commit != commit]
    if before:
        notes.append(f"{revision} moved: {before[0].source.rev8} was locked before, now it is {commit[:8]}")
    lock = next((k for k in found if k.source.commit == commit), None)
    return Pin(name=model.name, commit=commit, requested=revision or "main", lock=lock, notes=tuple(notes))
