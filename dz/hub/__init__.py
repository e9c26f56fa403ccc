"""Bytes: from the hub or a local folder to a verified, locked source. No torch; the hub client only when needed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dz.hub.acquire import Fetched, Preview, Request, fetch, preview
    from dz.hub.again import recheck
    from dz.hub.auditing import Audit, audit
    from dz.hub.lock import Lock
    from dz.hub.lookup import resolve, resolve_lock
    from dz.hub.verify import Findings, examine

_HOME = {
    "Fetched": "acquire",
    "Audit": "auditing",
    "Preview": "acquire",
    "Request": "acquire",
    "audit": "auditing",
    "fetch": "acquire",
    "preview": "acquire",
    "Lock": "lock",
    "recheck": "again",
    "resolve": "lookup",
    "resolve_lock": "lookup",
    "Findings": "verify",
    "examine": "verify",
}

__all__ = [
    "Audit",
    "Fetched",
    "Findings",
    "Lock",
    "Preview",
    "Request",
    "audit",
    "examine",
    "fetch",
    "preview",
    "recheck",
    "resolve",
    "resolve_lock",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dz.hub.{_HOME[name]}"), name)
