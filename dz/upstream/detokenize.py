"""Text from tokens as they arrive: what has been given out so far is always a prefix of the full decode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

LOST = "\ufffd"  # what decoders write for bytes that are no character (yet)
_LONG = 64  # tokens; a window that has grown longer is cut


class Detokenizer:
    """Decodes a growing list of tokens. `push` returns the characters that the new tokens settle, `flush` the rest, and
    all of them joined equal `decode(all tokens)`.

    Only a short window is decoded again: the tokens of the last settled piece as context (decoders may strip the space
    of their first token), and those after it. An unfinished multi-byte character shows as one trailing U+FFFD, which is
    held back. Byte tokens (`byte_ids`, the <0xNN> kind) are settled only when their run ends, since one invalid byte
    turns the whole run into U+FFFD. Tokens in `mute` decode to nothing."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        byte_ids: Collection[int] = frozenset(),
        mute: Collection[int] = frozenset(),
    ) -> None:
        self._decode, self._byte_ids, self._mute = decode, byte_ids, mute
        self._window: list[int] = []
        self._context = 0  # how many tokens of the window are settled
        self._given = 0  # characters of decode(window) that were given out

    def push(self, tokens: Sequence[int]) -> str:
        """The new settled text; empty while a character is unfinished."""
        new = [t for t in tokens if t not in self._mute]
        if not new:
            return ""
        self._window += new
        if new[-1] in self._byte_ids:
            return ""
        text = self._decode(self._window)
        whole = not text.endswith(LOST)
        end = len(text) if whole else len(text) - 1
        out = text[self._given : end]
        self._given = max(self._given, end)
        if whole and out:
            self._slide(text)
        elif len(self._window) > _LONG:
            self._cut(text)
        return out

    def flush(self) -> str:
        """What is left: an unfinished character comes as U+FFFD. The object is at its end then."""
        text = self._decode(self._window) if self._window else ""
        out = text[self._given :]
        self._window, self._context, self._given = [], 0, 0
        return out

    def _slide(self, text: str) -> None:
        """Make the tokens settled last the only context, unless they decode to nothing by themselves."""
        rest = self._window[self._context :]
        alone = self._decode(rest) if self._context else ""
        if alone:
            self._window, self._context, self._given = rest, len(rest), len(alone)
        else:
            self._context, self._given = len(self._window), len(text)

    def _cut(self, text: str) -> None:
        """Shorten a window that never settles (a model that repeats an invalid byte) where both halves decode to the
        whole. The tail kept is longer than any unfinished character."""
        for at in range(len(self._window) - 8, len(self._window) - 4):
            head = self._decode(self._window[:at])
            if len(head) <= self._given and head + self._decode(self._window[at:]) == text:
                self._window, self._context, self._given = self._window[at:], 0, self._given - len(head)
                return
