"""Two token sequences: equal, apart at a near tie, or really different."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TIE = 1e-3  # logits; where upstream's best two are closer than this, rounding decides


@dataclass(frozen=True, slots=True)
class Comparison:
    """`at` is the first index that differs (None: exact), `margin` upstream's margin there, `matched` how many tokens
    are equal before it."""

    kind: Literal["exact", "tie", "differs"]
    at: int | None
    margin: float | None
    matched: int


def compare_tokens(got: list[int], want: list[int], margins: list[float], tie: float = TIE) -> Comparison:
    """Compare `got` with upstream's `want`; `margins` are upstream's top-1 minus top-2 logits at each step.

    Past a difference nothing is comparable, so the first one decides; a missing or surplus token is a difference."""
    at = next((i for i, (g, w) in enumerate(zip(got, want, strict=False)) if g != w), None)
    if at is None and len(got) == len(want):
        return Comparison("exact", None, None, len(want))
    at = min(len(got), len(want)) if at is None else at
    margin = margins[at] if at < len(margins) else None
    kind = "tie" if margin is not None and margin < tie and at < len(got) else "differs"
    return Comparison(kind, at, margin, at)
