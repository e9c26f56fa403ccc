"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dz.core.messages import Logprob, Sampling


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are prompt and output; `computed` of them are in the cache. The first `whole` of them are computed in
    one piece (prompts with images; 0: none). After a preemption the outputs of `stepwise` sequences are computed again
    one at a time, as they were at first. `memo` belongs to the runner: upstream's cache, positions, and what was
    captured."""

    id: str
    tokens: list[int]
    prompt: int
    sampling: Sampling
    max_tokens: int
    whole: int = 0
    stepwise: bool = False
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    state: Literal["waiting", "running", "finished"] = "waiting"
    memo: Any = None
    chooser: Any = None
    prompt_logprobs: list[Logprob | None] | None = None
    preempted: int = 0

    @property
    def pending(self) -> int:
        """Tokens that are known but not yet in the cache."""
        return len(self.tokens) - self.computed

    @property
    def output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt

    @property
    def decoding(self) -> bool:
        """Whether only the newest generated token is pending."""
        return self.pending == 1 and self.output > 0


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of a sequence from `start`; `last` says that a token is chosen after them."""

    seq: Sequence
    start: int
    count: int

    @property
    def last(self) -> bool:
        """Whether the work reaches the end of the known tokens."""
        return self.start + self.count == len(self.seq.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `phase` is "prefill" as soon as one token of a prompt is in it."""

    work: tuple[Work, ...]

    @property
    def phase(self) -> str:
        """The phase whose execution plan runs."""
        return "decode" if all(w.seq.decoding for w in self.work) else "prefill"

    @property
    def kind(self) -> str:
        """For the counters: prefill, decode or mixed."""
        decoding = sum(w.seq.decoding for w in self.work)
        return "decode" if decoding == len(self.work) else ("mixed" if decoding else "prefill")

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return sum(w.count for w in self.work)
