"""Token sequences against the reference's: the first difference, and whether a near tie explains it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["exact", "tie", "differs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One sequence compared. `at` is the index of the first difference (None: exact), `want` and `got` the tokens
    there (None: that side had ended), `margin` the reference's top-1 margin at that step (None: not known).
    `matched` tokens agree before it. After a near tie the two continue from different prefixes, so nothing behind
    `at` is compared."""

    verdict: Verdict
    at: int | None = None
    want: int | None = None
    got: int | None = None
    margin: float | None = None
    matched: int = 0

    def text(self) -> str:
        """The difference in words."""
        if self.at is None:
            return f"{self.matched} tokens equal"
        want = "the end" if self.want is None else self.want
        got = "the end" if self.got is None else self.got
        margin = "" if self.margin is None else f", margin {self.margin:.2g}"
        return f"token {self.at}: {got} instead of {want}{margin}"


def first_difference(want: Sequence[int], got: Sequence[int]) -> int | None:
    """The index of the first position at which two sequences differ, one being longer included; None if equal."""
    for i, (a, b) in enumerate(zip(want, got, strict=False)):
        if a != b:
            return i
    return None if len(want) == len(got) else min(len(want), len(got))


def compare(want: Sequence[int], got: Sequence[int], *, margins: Sequence[float] = (), tie: float = 0.0) -> Divergence:
    """Compare `got` with the reference's `want`. `margins[i]` is the reference's top-1 margin at step i; the step at
    which it chose to stop has one too. A difference at a step whose margin is below `tie` is a tie."""
    at = first_difference(want, got)
    if at is None:
        return Divergence(verdict="exact", matched=len(want))
    known = margins[at] if at < len(margins) else None
    return Divergence(
        verdict="tie" if known is not None and known < tie else "differs",
        at=at,
        want=want[at] if at < len(want) else None,
        got=got[at] if at < len(got) else None,
        margin=known,
        matched=at,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Many sequences. `matched` of `compared` tokens agree; a sequence that ends in a near tie counts its tokens before
    the tie, one that differs counts the differing token too."""

    exact: int = 0
    ties: int = 0
    differs: int = 0
    matched: int = 0
    compared: int = 0

    @property
    def n(self) -> int:
        """How many sequences."""
        return self.exact + self.ties + self.differs

    @property
    def share(self) -> float:
        """Matched tokens of compared tokens; 0 when nothing was compared."""
        return self.matched / self.compared if self.compared else 0.0


def summarise(found: Iterable[Divergence]) -> Summary:
    """Count the verdicts and the tokens."""
    items = list(found)
    return Summary(
        exact=sum(d.verdict == "exact" for d in items),
        ties=sum(d.verdict == "tie" for d in items),
        differs=sum(d.verdict == "differs" for d in items),
        matched=sum(d.matched for d in items),
        compared=sum(d.matched + (d.verdict == "differs") for d in items),
    )
