"""How far two next-token distributions are apart, and whether a text has collapsed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

Top = list[tuple[int, float]]


def kl_bounds(p: Top, q: Top) -> tuple[float, float]:
    """Lower and upper bound, in nats, of KL(p || q) = sum p ln(p / q) from the two lists of best (token, logprob).

    Tokens that both lists hold are exact. The rest of p has the mass r, the rest of q the mass s: by the log-sum
    inequality it adds at least r ln(r / s), and at most r * 104, since a float32 softmax holds nothing below e^-104."""
    listed = dict(q)
    exact, shared_p, shared_q = 0.0, 0.0, 0.0
    for token, lp in p:
        if token in listed:
            mass = math.exp(lp)
            exact += mass * (lp - listed[token])
            shared_p += mass
            shared_q += math.exp(listed[token])
    r, s = max(0.0, 1.0 - shared_p), max(0.0, 1.0 - shared_q)
    if r < 1e-6:  # what float32 lists leave over by rounding
        return max(0.0, exact), max(0.0, exact)
    lower = exact + r * math.log(r / s) if s > 0 else math.inf
    return max(0.0, lower), max(0.0, exact) + r * 104.0


@dataclass(frozen=True, slots=True)
class Degeneracy:
    """`distinct` tokens, the `longest_run` of one token, the `period` of a repeating end (0: none), the `entropy` of
    the token counts in bits; `reason` says why the text counts as collapsed, None when it does not."""

    distinct: int
    longest_run: int
    period: int
    entropy: float
    reason: str | None


def degenerate(tokens: list[int]) -> Degeneracy:
    """Statistics of one output. Collapsed: one token for 16 or more in a row, or the last half is one pattern repeated
    at least four times. Outputs under 16 tokens are never called collapsed."""
    counts = Counter(tokens)
    n = len(tokens)
    entropy = -sum(c / n * math.log2(c / n) for c in counts.values()) if n else 0.0
    run, period = _longest_run(tokens), _period(tokens)
    reason = None
    if n >= 16 and run >= 16:
        reason = f"one token {run} times in a row"
    elif n >= 16 and period:
        reason = f"the last half repeats a pattern of {period} tokens"
    return Degeneracy(len(counts), run, period, entropy, reason)


def _longest_run(tokens: list[int]) -> int:
    best = run = 0
    for i, t in enumerate(tokens):
        run = run + 1 if i and t == tokens[i - 1] else 1
        best = max(best, run)
    return best


def _period(tokens: list[int]) -> int:
    half = tokens[len(tokens) // 2 :]
    return next(
        (p for p in range(1, len(half) // 4 + 1) if all(half[i] == half[i - p] for i in range(p, len(half)))), 0
    )
