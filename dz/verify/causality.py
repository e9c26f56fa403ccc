"""Is a model causal? Change the tokens behind a position: nothing at or before it may move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Causality:
    """`max_change` is the largest change of a logit at positions <= `cut`, first reached at position `at` (-1: none
    changed); `behind` is the largest change after `cut`: 0 there means that the probe changed nothing at all."""

    causal: bool
    cut: int
    max_change: float
    at: int
    behind: float
    reason: str


def altered(tokens: Sequence[int], cut: int, vocab: int) -> list[int]:
    """The tokens with every one behind position `cut` replaced by another of the same prompt, or its neighbour in a
    vocabulary of `vocab`: tokens that the model has seen, so that special ids are not hit by accident.

    Raises ValueError unless 0 <= cut < len(tokens) - 1."""
    if not 0 <= cut < len(tokens) - 1:
        raise ValueError(f"cut {cut} leaves nothing to change in {len(tokens)} tokens")
    head, tail = list(tokens[: cut + 1]), list(tokens[cut + 1 :])
    mirrored = tail[::-1]
    return head + [new if new != old else (old + 1) % vocab for old, new in zip(tail, mirrored, strict=True)]


def compare(before: torch.Tensor, after: torch.Tensor, cut: int, *, tolerance: float = 1e-3) -> Causality:
    """The verdict on logits [T, V] of a prompt and of its altered twin. A change above `tolerance` (in logits) at or
    before `cut` means that later tokens are seen; one below is rounding, since later rows share matrix products."""
    change = (after.double() - before.double()).abs().amax(-1)
    early, behind = change[: cut + 1], float(change[cut + 1 :].max())
    worst = float(early.max())
    at = int(early.argmax()) if worst > 0 else -1
    if behind == 0:
        return Causality(
            causal=False,
            cut=cut,
            max_change=worst,
            at=at,
            behind=behind,
            reason="the probe is blind: other tokens change nothing",
        )
    if not worst <= tolerance:
        reason = f"other tokens after position {cut} change the logits at position {at} by {worst:.2g}"
        return Causality(causal=False, cut=cut, max_change=worst, at=at, behind=behind, reason=reason)
    reason = f"tokens after position {cut} move nothing before them (at most {worst:.1g})"
    return Causality(causal=True, cut=cut, max_change=worst, at=at, behind=behind, reason=reason)


def probe(
    forward: Callable[[list[int]], torch.Tensor],
    tokens: Sequence[int],
    *,
    vocab: int,
    cut: int | None = None,
    tolerance: float = 1e-3,
) -> Causality:
    """Probe a model: `forward` takes token ids and gives logits [T, V]. `cut` defaults to the middle."""
    at = len(tokens) // 2 - 1 if cut is None else cut
    return compare(forward(list(tokens)), forward(altered(tokens, at, vocab)), at, tolerance=tolerance)
