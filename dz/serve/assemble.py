"""From the engine's outputs of one sequence to pieces of text: decoding, stop strings, and what a finish means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dz.core.messages import Logprob, Output
from dz.serve.stops import StopStrings
from dz.upstream.detokenize import Detokenizer


@dataclass(slots=True)
class Piece:
    """What an Output adds. `tokens` include a stop token that ended the text, `logprobs` go with the others. `finish`
    is "stop", "length" or "abort" with the last piece; `reason` is the stop string or stop token id that the request
    asked for."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None
    reason: str | int | None = None

    def add(self, other: Piece) -> None:
        """Append a later piece."""
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.finish, self.reason = other.finish, other.reason


class Assembler:
    """One sequence. Text of the first `min_tokens` tokens cannot be part of a stop string."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._text, self._stops = detokenizer, StopStrings(stops, include=include_stop)
        self._stop_ids, self._include, self._min_tokens = frozenset(stop_token_ids), include_stop, min_tokens
        self._count = 0

    def feed(self, output: Output) -> Piece:
        """The piece for an Output. Where it has a `finish` and the Output had none, the engine must be told to stop."""
        piece = Piece()
        for i, token in enumerate(output.tokens):
            piece.tokens.append(token)
            if output.logprobs is not None:
                piece.logprobs.append(output.logprobs[i])
            self._count += 1
            if self._add(piece, self._text.push([token])):
                return piece
        if output.finish is not None:
            self._end(piece, output)
        return piece

    def _add(self, piece: Piece, text: str) -> bool:
        """Append text as far as stop strings allow; True when one is complete."""
        if self._count <= self._min_tokens:
            piece.text += text
            return False
        out, hit = self._stops.push(text)
        piece.text += out
        if hit is not None:
            piece.finish, piece.reason = "stop", hit
        return hit is not None

    def _end(self, piece: Piece, output: Output) -> None:
        stop = output.stop_token
        if stop is not None:
            piece.tokens.append(stop)
            if self._include and stop in self._stop_ids and self._add(piece, self._text.push([stop])):
                return
        if self._add(piece, self._text.flush()):
            return
        piece.text += self._stops.flush()
        piece.finish = output.finish
        piece.reason = stop if stop in self._stop_ids else None
