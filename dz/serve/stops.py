"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string to be complete, as if the text came one character at a time: how it is cut into
    pieces changes nothing. Text that may be the beginning of a stop string is held back."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(dict.fromkeys(stops)), include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be given out, and the stop string if one is complete; the rest is dropped then."""
        if not self._stops:
            return text, None
        self._held += text
        hits = [(at + len(s), at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if hits:
            end, start, stop = min(hits)
            out, self._held = self._held[: end if self._include else start], ""
            return out, stop
        keep = self._beginning()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out, None

    def flush(self) -> str:
        """The text held back, when no more comes."""
        out, self._held = self._held, ""
        return out

    def _beginning(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-n:]
            if any(s.startswith(tail) for s in self._stops):
                return n
        return 0
