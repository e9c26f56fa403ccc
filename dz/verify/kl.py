"""Distributions over the vocabulary, of which only the likeliest tokens are known, compared.

Both sides give natural-log probabilities of some tokens. With S the tokens that both name, p and q are compared as
distributions over S and one bucket for everything else, with the rests r_p = 1 - sum_S p and r_q = 1 - sum_S q:

    KL_S = sum_S p (log p - log q) + r_p (log r_p - log r_q)

Merging tokens into a bucket never increases a KL divergence (data processing inequality; Cover and Thomas, Elements of
Information Theory, 2.8 and 2.7.1), so KL_S is a lower bound of KL(p || q) and equals it when r_p = 0. There is no upper
bound: a token of the rest may have probability 0 in q. The Jensen-Shannon divergence has both bounds, because the rest
adds at least nothing and at most (r_p + r_q) / 2 * ln 2:

    JS_S <= JS(p, q) <= sum_S JS terms + (r_p + r_q) / 2 * ln 2
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLOOR = 1e-12  # the smallest probability of a rest: below it the sum over S is 1 but for rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far q is from p at one position. `kl` is the lower bound KL_S in nats, `js_low` and `js_high` bound the
    Jensen-Shannon divergence, `missing_p` and `missing_q` are the rests, `shared` is the size of S, `max_diff` the
    largest |log p - log q| over S, and `top1` whether both have the same likeliest token."""

    kl: float
    js_low: float
    js_high: float
    missing_p: float
    missing_q: float
    shared: int
    max_diff: float
    top1: bool


def gap(p: Mapping[int, float], q: Mapping[int, float]) -> Gap:
    """Compare log probabilities by token id. Raises ValueError when one side is empty, they share no token, or a
    value is NaN or above 0 by more than rounding."""
    _check(p, "p")
    _check(q, "q")
    shared = p.keys() & q.keys()
    if not shared:
        raise ValueError("the two distributions name no common token")
    pairs = [(math.exp(p[t]), math.exp(q[t])) for t in shared]
    rest_p = max(1.0 - sum(a for a, _ in pairs), 0.0)
    rest_q = max(1.0 - sum(b for _, b in pairs), 0.0)
    kl = sum(math.exp(p[t]) * (p[t] - q[t]) for t in shared if p[t] > -math.inf)
    if rest_p > FLOOR:
        kl += rest_p * math.log(rest_p / max(rest_q, FLOOR))
    terms = sum(_js(a, b) for a, b in pairs)
    return Gap(
        kl=max(kl, 0.0),
        js_low=max(terms + _js(rest_p, rest_q), 0.0),
        js_high=terms + (rest_p + rest_q) / 2 * math.log(2),
        missing_p=rest_p,
        missing_q=rest_q,
        shared=len(shared),
        max_diff=max(_distance(p[t], q[t]) for t in shared),
        top1=max(p, key=p.__getitem__) == max(q, key=q.__getitem__),
    )


def _check(side: Mapping[int, float], name: str) -> None:
    if not side:
        raise ValueError(f"{name} names no token")
    for token, value in side.items():
        if math.isnan(value) or value > 1e-4:
            raise ValueError(f"{name} gives token {token} the log probability {value}")


def _distance(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b)  # two -inf are equal


def _js(a: float, b: float) -> float:
    m = (a + b) / 2
    return sum(x * math.log(x / m) for x in (a, b) if x > 0) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Gaps over many positions. `top1` is the share of positions with the same likeliest token, those that are near
    ties in the reference left out (`ties` of them disagree); `missing` is the largest rest on either side."""

    n: int
    kl_mean: float
    kl_max: float
    js_high_max: float
    max_diff: float
    missing: float
    top1: float
    ties: int


def summarise(gaps: Sequence[Gap], margins: Sequence[float], *, tie: float) -> Gaps:
    """Summary of gaps with the reference's top-1 margin at each. Raises ValueError for no gaps or unequal lengths."""
    if not gaps or len(gaps) != len(margins):
        raise ValueError(f"{len(gaps)} positions with {len(margins)} margins")
    agree = [g.top1 for g in gaps]
    ties = sum(not a and m < tie for a, m in zip(agree, margins, strict=True))
    counted = len(gaps) - ties
    return Gaps(
        n=len(gaps),
        kl_mean=math.fsum(g.kl for g in gaps) / len(gaps),
        kl_max=max(g.kl for g in gaps),
        js_high_max=max(g.js_high for g in gaps),
        max_diff=max(g.max_diff for g in gaps),
        missing=max(max(g.missing_p, g.missing_q) for g in gaps),
        top1=sum(agree) / counted if counted else 1.0,
        ties=ties,
    )
