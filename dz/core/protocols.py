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
    """What the cache facade needs of the engine's pools during one step; layers and slots are the engine's business.
    Tensors: k, v [T, H, D] of the step's tokens in their packed order."""

    def write(self, layer: int, k: Any, v: Any) -> None:
        """Store the step's new tokens of a layer."""

    def gather(self, layer: int) -> tuple[Any, Any]:
        """Keys and values of all sequences of the step, in the form the step's mask describes."""
