"""The JSON of answers, whole and in chunks, in the two forms of the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dz.core.messages import Logprob
from dz.serve import logprobs
from dz.serve.assemble import Piece
from dz.serve.errors import ApiError
from dz.serve.job import Choice, Job
from dz.serve.logprobs import Columns, Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request asks to see beside the text."""

    id: str
    model: str
    shown: Shown
    logprobs: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    usage: bool = False
    usage_always: bool = False
    echo: bool = False
    drop_output: bool = False  # echo with max_tokens 0: the one token that the engine makes is not shown
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, kind: str) -> dict[str, Any]:
        """The fields that every document has."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Shape(Protocol):
    """How choices are written."""

    def whole(self, job: Job) -> dict[str, Any]:
        """The answer, not streamed."""
        ...

    def opening(self, job: Job) -> list[dict[str, Any]]:
        """Chunks to begin a stream with."""
        ...

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """The chunk for a piece; None when there is nothing to say."""
        ...

    def bare(self) -> dict[str, Any]:
        """A chunk without choices, for the usage."""
        ...


class ChatShape:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, wanted: Wanted) -> None:
        self._want = wanted

    def whole(self, job: Job) -> dict[str, Any]:
        """See Shape."""
        out = self._want.envelope("chat.completion")
        out["choices"] = [self._choice(c) for c in job.choices]
        out["usage"] = job.usage()
        first = job.choices[0]
        out["prompt_logprobs"] = _prompt_logprobs(self._want, first)
        if self._want.token_ids:
            out["prompt_token_ids"] = first.prompt.tokens
        return out

    def _choice(self, choice: Choice) -> dict[str, Any]:
        end = choice.whole
        out = {
            "index": choice.index,
            "message": {"role": "assistant", "content": end.text, "refusal": None},
            "logprobs": self._logprobs(end.logprobs),
            "finish_reason": end.finish,
            "stop_reason": end.reason,
        }
        return {**out, "token_ids": end.tokens} if self._want.token_ids else out

    def opening(self, job: Job) -> list[dict[str, Any]]:
        """See Shape."""
        out = []
        for c in job.choices:
            chunk = self._chunk(c.index, {"role": "assistant", "content": ""})
            if self._want.token_ids:
                chunk["prompt_token_ids"] = c.prompt.tokens
            out.append(chunk)
        return out

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """See Shape."""
        shows = piece.text or piece.finish or (piece.tokens and (self._want.logprobs or self._want.token_ids))
        if not shows:
            return None
        out = self._chunk(choice.index, {"content": piece.text} if piece.text or not piece.finish else {})
        body = out["choices"][0]
        body |= {"logprobs": self._logprobs(piece.logprobs), "finish_reason": piece.finish}
        if piece.finish:
            body["stop_reason"] = piece.reason
        if self._want.token_ids:
            body["token_ids"] = piece.tokens
        return out

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self.bare(), "choices": [choice]}

    def bare(self) -> dict[str, Any]:
        """See Shape."""
        return {**self._want.envelope("chat.completion.chunk"), "choices": []}

    def _logprobs(self, entries: Sequence[Logprob]) -> dict[str, Any] | None:
        return logprobs.chat(entries, self._want.shown) if self._want.logprobs and entries else None


class CompletionShape:
    """text_completion, whole and in chunks."""

    def __init__(self, wanted: Wanted) -> None:
        self._want = wanted
        self._columns: dict[int, Columns] = {}

    def whole(self, job: Job) -> dict[str, Any]:
        """See Shape."""
        choices = []
        for c in job.choices:
            shown = Piece("", [], [], c.whole.finish, c.whole.reason) if self._want.drop_output else c.whole
            choices.append(self._choice(c, shown, begins=True))
            choices[-1]["prompt_logprobs"] = _prompt_logprobs(self._want, c)
        usage = job.usage()
        if self._want.drop_output:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {**self._want.envelope("text_completion"), "choices": choices, "usage": usage}

    def opening(self, job: Job) -> list[dict[str, Any]]:
        """See Shape. Completions have no opening chunk."""
        return []

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """See Shape. The first chunk of a choice brings the echoed prompt."""
        begins = choice.index not in self._columns
        if self._want.drop_output:
            piece = Piece("", [], [], piece.finish, piece.reason)
        asks = self._want.logprobs or self._want.token_ids
        if not (piece.text or piece.finish or (begins and self._want.echo) or (piece.tokens and asks)):
            return None
        return {**self.bare(), "choices": [self._choice(choice, piece, begins=begins)]}

    def bare(self) -> dict[str, Any]:
        """See Shape."""
        return {**self._want.envelope("text_completion"), "choices": []}

    def _choice(self, choice: Choice, piece: Piece, *, begins: bool) -> dict[str, Any]:
        echoes = begins and self._want.echo
        out = {
            "index": choice.index,
            "text": (choice.prompt.text if echoes else "") + piece.text,
            "logprobs": self._columns_of(choice, piece, echoes) if self._want.logprobs else None,
            "finish_reason": piece.finish,
            "stop_reason": piece.reason,
        }
        self._columns.setdefault(choice.index, Columns(self._want.shown))
        if self._want.token_ids:
            out["token_ids"] = piece.tokens
            if begins:
                out["prompt_token_ids"] = choice.prompt.tokens
        return out

    def _columns_of(self, choice: Choice, piece: Piece, echoes: bool | None) -> dict[str, Any]:
        columns = self._columns.setdefault(choice.index, Columns(self._want.shown))
        if echoes:
            entries = choice.prompt_logprobs or []
            if len(entries) != len(choice.prompt.tokens):
                raise ApiError(500, "the engine did not give the log-probabilities of the whole prompt")
            for token, entry in zip(choice.prompt.tokens, entries, strict=True):
                columns.add(token, entry)
        for entry in piece.logprobs:
            columns.add(entry.token, entry)
        return columns.take()


def _prompt_logprobs(want: Wanted, choice: Choice) -> list[dict[str, Any] | None] | None:
    if not want.prompt_logprobs or choice.prompt_logprobs is None:
        return None
    return logprobs.prompt(choice.prompt_logprobs, want.shown)
