"""What one decoder layer keeps for a sequence and how many parameters it has, by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shared = Literal["heads", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A part of a layer's cache. `kind` is a technique ("keys and values", "latent", "index keys", "window",
    "compressed", "recurrent state", "convolution"). Elements are at the cache's dtype unless `fixed_bytes` says
    otherwise: `per_token` grows with each token (a fraction where tokens are pooled), `window` elements a token for at
    most `tokens` tokens, `fixed_bytes` once a sequence. `token_bytes` are bytes a token whatever the cache's dtype.

    `split` says what tensor parallelism does: "heads" divides it by at most `heads`, "whole" leaves it on each."""

    kind: str
    per_token: float = 0.0
    token_bytes: float = 0.0
    window: int = 0
    tokens: int = 0
    fixed_bytes: int = 0
    split: Shared = "heads"
    heads: int = 1
    formula: str = ""

    def of_token(self, itemsize: float) -> float:
        """Bytes that one more token costs, at `itemsize` bytes an element."""
        return self.per_token * itemsize + self.token_bytes

    def of_sequence(self, itemsize: float) -> float:
        """Bytes that a sequence costs whatever its length (a window is counted full)."""
        return self.fixed_bytes + self.window * self.tokens * itemsize

    def share(self, ranks: int) -> float:
        """The part of it that each of `ranks` tensor-parallel devices holds."""
        return 1.0 if self.split == "whole" else 1.0 / min(ranks, max(self.heads, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """A layer's token mixer: the op it would be, what it keeps, its parameters, and how many query heads it has."""

    op: str
    keeps: tuple[Keep, ...]
    parameters: int
    heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """What follows the mixer: `experts` of `expert` parameters each (0: none), `dense` parameters beside them, the
    router's and the shared experts' among these; `width` is the widest inner activation of a token,
    `gated` whether a gate multiplies it."""

    dense: int = 0
    experts: int = 0
    expert: int = 0
    active: int = 0
    width: int = 0
    gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    mixer: Mixer
    forward: FeedForward
    vectors: int = 0
