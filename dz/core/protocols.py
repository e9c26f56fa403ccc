"""The seams between layers that may not import each other."""

from __future__ import annotations

from typing import Any, Protocol


class Progress(Protocol):
    """Where a long step reports; the command line shows it, tests collect it. Everything goes to stderr."""

    def start(self, name: str, total: int | None = None, unit: str = "") -> None:
        """A step begins; `total` in `unit` if known."""

    def advance(self, n: int = 1) -> None:
        """`n` more units of the current step are done."""

    def finish(self, note: str = "") -> None:
        """The current step is done."""

    def note(self, text: str) -> None:
        """A line worth reading that is not the answer."""


class Silent:
    """A Progress that drops everything: for library use and tests."""

    def start(self, name: str, total: int | None = None, unit: str = "") -> None:
        """Drop it."""

    def advance(self, n: int = 1) -> None:
        """Drop it."""

    def finish(self, note: str = "") -> None:
        """Drop it."""

    def note(self, text: str) -> None:
        """Drop it."""


class KVStore(Protocol):
    """What the cache facade needs of the engine's pools during one step."""

    def exchange(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Store the step's new keys and values of a layer and return those of all its sequences.

        k [B, H, S, Dk] and v [B, H, S, Dv]: packed (B = 1) or one token a row (S = 1). The answer has the same form,
        its third axis as long as the step's mask says."""
        ...
