"""Degenerate output: one token for ever, short loops, no information. Statistics, and a verdict in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

FEW = 8  # with fewer tokens than this nothing is said: a short right answer may well repeat
LONGEST_PERIOD = 8  # tokens; longer loops are a matter of style
COVER = 0.75  # share of the output, counted from its end, that a loop must cover
ROUNDS = 4  # how often a loop must go round at least
FLAT = 1.0  # bits per token of the empirical distribution; English text of 64 tokens has four to six


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Statistics of one output: `entropy` in bits of its token frequencies, `run` the longest run of one token,
    `period` and `looped` the shortest loop that covers most of the end of the output (0, 0.0: none)."""

    n: int
    distinct: int
    entropy: float
    run: int
    period: int
    looped: float

    @property
    def degenerate(self) -> str:
        """Why this output is degenerate, or empty."""
        if self.n == 0:
            return "nothing was generated"
        if self.n < FEW:
            return ""
        if self.distinct == 1:
            return f"one token {self.n} times"
        if self.period:
            return f"a loop of {self.period} tokens over {self.looped:.0%} of the output"
        if self.entropy < FLAT:
            return f"{self.entropy:.2f} bits per token"
        return ""


def measure(tokens: Sequence[int]) -> Output:
    """The statistics of one output's token ids."""
    counts = Counter(tokens)
    n = len(tokens)
    period, looped = _loop(tokens)
    return Output(
        n=n,
        distinct=len(counts),
        entropy=-sum(c / n * math.log2(c / n) for c in counts.values()),
        run=_longest_run(tokens),
        period=period,
        looped=looped,
    )


def _longest_run(tokens: Sequence[int]) -> int:
    best = run = 0
    last: int | None = None
    for t in tokens:
        run = run + 1 if t == last else 1
        last, best = t, max(best, run)
    return best


def _loop(tokens: Sequence[int]) -> tuple[int, float]:
    """The shortest period p for which the longest suffix with t[i] == t[i - p] is long enough, and its share."""
    n = len(tokens)
    for period in range(1, min(LONGEST_PERIOD, n // ROUNDS) + 1):
        i = n - 1
        while i >= period and tokens[i] == tokens[i - period]:
            i -= 1
        length = n - 1 - i + period
        if length >= ROUNDS * period and length >= COVER * n:
            return period, length / n
    return 0, 0.0


def worse(ours: Sequence[Output], upstream: Sequence[Output]) -> list[tuple[int, str]]:
    """The outputs that are degenerate where upstream's answer to the same prompt is not: (index, why). A model that
    loops under upstream's own code is no fault of the engine."""
    pairs = enumerate(zip(ours, upstream, strict=True))
    return [(i, mine.degenerate) for i, (mine, theirs) in pairs if mine.degenerate and not theirs.degenerate]
