"""One request on its way through the engine: its sequences, their pieces of text, and their end."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dz.core.messages import Blob, Logprob, Output, Sampling, Submit
from dz.serve.assemble import Assembler, Piece
from dz.serve.errors import ApiError, bad
from dz.serve.metrics import Metrics
from dz.serve.supervisor import Sink, Supervisor
from dz.upstream.detokenize import Detokenizer

log = logging.getLogger("dz.serve")
_AT_FAULT = {
    "too_long": "the request is too long",
    "never_fits": "the request never fits",
    "bad_image": "bad image",
    "nothing_to_choose": "penalties and biases leave no token to choose",
}


class Decoding(Protocol):
    """Where sequences get their incremental decoder."""

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new one."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine; `text` is what echo gives back."""

    tokens: list[int]
    text: str = ""
    media: Mapping[str, Blob] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to generate: `sampling` goes with each prompt, `n` sequences for each. The rest is about their text."""

    prompts: Sequence[Prompt]
    sampling: Sequence[Sampling]
    n: int = 1
    stops: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()  # those that the request named; the engine may have more
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(slots=True)
class Choice:
    """One sequence. `whole` is everything so far; times are monotonic seconds."""

    index: int
    prompt: Prompt
    sampling: Sampling
    engine_id: str
    assembler: Assembler
    whole: Piece = field(default_factory=Piece)
    prompt_logprobs: list[Logprob | None] | None = None
    cached_tokens: int = 0
    first_at: float | None = None
    last_at: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether its last piece has come."""
        return self.whole.finish is not None


class Job:
    """`start`, read `pieces` to the end or not, and `close` in any case."""

    def __init__(self, engine: Supervisor, decoding: Decoding, metrics: Metrics, plan: Plan, name: str) -> None:
        self._engine, self._metrics, self.plan, self.name = engine, metrics, plan, name
        self._sink = Sink()
        self.arrived = time.monotonic()
        self.choices = [self._choice(decoding, i) for i in range(len(plan.prompts) * plan.n)]
        self._by_id = {c.engine_id: c for c in self.choices}

    def _choice(self, decoding: Decoding, index: int) -> Choice:
        plan, (at, copy) = self.plan, divmod(index, self.plan.n)
        sampling = plan.sampling[at]
        if sampling.seed is not None and copy:
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + copy + 2**63) % 2**64 - 2**63)
        assembler = Assembler(
            decoding.detokenizer(skip_special_tokens=plan.skip_special_tokens),
            stops=plan.stops,
            stop_token_ids=plan.stop_token_ids,
            include_stop=plan.include_stop,
            min_tokens=sampling.min_tokens,
        )
        return Choice(index, plan.prompts[at], sampling, f"{uuid.uuid4().hex}-{index}", assembler)

    async def start(self) -> None:
        """Submit every sequence. Raises ApiError 503."""
        self._metrics.n.observe(self.plan.n)
        for prompt, sampling in zip(self.plan.prompts, self.plan.sampling, strict=True):
            self._metrics.prompt_tokens.inc(len(prompt.tokens))
            self._metrics.prompt_lengths.observe(len(prompt.tokens))
            self._metrics.max_tokens.observe(sampling.max_tokens)
        for c in self.choices:
            message = Submit(c.engine_id, c.prompt.tokens, c.sampling, dict(c.prompt.media))
            await self._engine.submit(message, self._sink)

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """Each piece with its sequence, as they come. Raises ApiError when the engine fails or refuses."""
        left = len(self.choices)
        while left:
            got = await self._sink.queue.get()
            if isinstance(got, ApiError):
                raise got
            choice = self._by_id[got.id]
            if choice.finished:  # outputs on their way when a stop string ended it
                continue
            piece = self._take(choice, got)
            if choice.finished:
                left -= 1
                self._observe_end(choice)
                if got.finish is None:
                    await self._engine.abort([choice.engine_id])
            yield choice, piece

    def _take(self, choice: Choice, output: Output) -> Piece:
        if output.error is not None or output.finish == "error":
            raise self._error(output)
        piece = choice.assembler.feed(output)
        now, count = time.monotonic(), len(piece.tokens)
        if count and choice.first_at is None:
            choice.first_at = now
            self._metrics.ttft.observe(now - self.arrived)
        elif count:
            self._metrics.itl.observe((now - choice.last_at) / count)
        choice.last_at = now
        self._metrics.generation_tokens.inc(count)
        choice.cached_tokens = max(choice.cached_tokens, output.cached_tokens)
        choice.prompt_logprobs = output.prompt_logprobs or choice.prompt_logprobs
        choice.whole.add(piece)
        return piece

    def _error(self, output: Output) -> ApiError:
        code, message = output.error or ("internal", "")
        self._metrics.finished("error")
        if code in _AT_FAULT:
            return bad(message or _AT_FAULT[code])
        log.error("request %s: the engine failed (%s): %s", self.name, code, message)
        if code == "non_finite":
            return ApiError(500, "the model produced values that are not finite for this request")
        return ApiError(500, f"the engine failed on this request; the server's log tells more (request {self.name})")

    def _observe_end(self, choice: Choice) -> None:
        count, now = len(choice.whole.tokens), choice.last_at
        self._metrics.finished(choice.whole.finish or "stop")
        self._metrics.output_lengths.observe(count)
        self._metrics.e2e.observe(now - self.arrived)
        if count > 1 and choice.first_at is not None:
            self._metrics.tpot.observe((now - choice.first_at) / (count - 1))

    async def close(self) -> None:
        """Abort what has not finished."""
        unfinished = [c for c in self.choices if not c.finished]
        for _ in unfinished:
            self._metrics.finished("abort")
        await self._engine.abort([c.engine_id for c in unfinished])

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object for what has been generated so far; a prompt counts once, whatever n is."""
        prompt = sum(len(p.tokens) for p in self.plan.prompts)
        done = sum(len(c.whole.tokens) for c in self.choices)
        cached = sum(c.cached_tokens for c in self.choices[:: self.plan.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": done,
            "total_tokens": prompt + done,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
