"""The attention mask of each layer as a rule, read off the masks that upstream builds itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from dz.engine.mixers.taps import Learn, Record, Taps
from dz.upstream.cache import make_past
from dz.upstream.decoder import Decoder

LARGEST = 1 << 17  # tokens; windows beyond this are not probed


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which keys a query at position p sees: full (all up to p), window (the last `size` up to p), or chunk (those of
    the same chunk of `size`, up to p)."""

    kind: Literal["full", "window", "chunk"]
    size: int = 0

    def allowed(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Boolean mask from positions of queries and keys that broadcast against each other."""
        seen = key <= query
        if self.kind == "window":
            seen = seen & (key > query - self.size)
        elif self.kind == "chunk":
            seen = seen & (
                torch.div(key, self.size, rounding_mode="floor") == torch.div(query, self.size, rounding_mode="floor")
            )
        return seen

    def trivial(self, length: int) -> bool:
        """Whether plain causal attention is the same for a context of `length`."""
        return self.kind == "full" or length <= self.size


@dataclass(frozen=True, slots=True)
class Masks:
    """The rule of every layer that has a mixer, and whether upstream's masks are boolean or additive."""

    rules: dict[int, MaskRule]
    additive: bool


def read_masks(decoder: Decoder, taps: Taps, learn: Learn, with_mixers: set[int]) -> Masks | str:
    """The rules, or why they cannot be read: upstream is asked for its masks for three tokens behind a past that is
    longer than any window of its configuration."""
    config = decoder.built.text_config
    windows = [
        v
        for k, v in config.to_dict().items()
        if isinstance(v, int) and not isinstance(v, bool) and ("window" in k or "chunk" in k) and 0 < v <= LARGEST
    ]
    past, n = max(windows, default=8) + 9, 3
    device = next(decoder.module.parameters()).device
    positions = torch.arange(past, past + n, device=device)[None]
    record = Record(learn.forms)
    with taps.using(record):
        decoder(
            cache=make_past(config, past), positions=positions, ids=torch.zeros(1, n, dtype=torch.long, device=device)
        )
    rules: dict[int, MaskRule] = {}
    additive = False
    for index in sorted(with_mixers):
        mask = record.named[index].get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or tuple(mask.shape[-2:]) != (n, past + n):
            return f"layer {index} gets no dense attention mask from upstream"
        additive = mask.dtype != torch.bool
        rule = _rule(mask[0, 0] == 0 if additive else mask[0, 0], past)
        if rule is None:
            return f"the attention mask of layer {index} is neither causal, windowed nor chunked"
        rules[index] = rule
    return Masks(rules, additive)


def _rule(allowed: torch.Tensor, past: int) -> MaskRule | None:
    n, total = allowed.shape
    query = torch.arange(past, past + n, device=allowed.device)[:, None]
    key = torch.arange(total, device=allowed.device)[None]
    last = int(allowed[0].sum())
    chunks = [past - int(allowed[0].nonzero()[0])] if last else []
    tries: list[MaskRule] = [MaskRule("full"), MaskRule("window", last)]
    tries += [MaskRule("chunk", c) for start in chunks for c in _divisors(past - start) if c > start]
    return next((r for r in tries if torch.equal(r.allowed(query, key), allowed)), None)


def _divisors(n: int) -> list[int]:
    return [d for d in range(n, 1, -1) if n % d == 0] if n > 1 else []


def as_mask(allowed: torch.Tensor, *, additive: bool, dtype: torch.dtype) -> Any:
    """[B, 1, S, K] in the form upstream's attention expects: boolean, or 0 and the lowest number of `dtype`."""
    allowed = allowed[:, None]
    if not additive:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)
