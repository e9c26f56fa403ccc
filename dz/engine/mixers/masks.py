"""The attention mask of each layer as a rule, read off the masks that upstream builds itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from dz.engine.mixers.taps import Learn, Record, Taps
from dz.upstream.cache import make_past
from dz.upstream.decoder import Decoder

PROBE = 3  # tokens


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


def read_masks(decoder: Decoder, taps: Taps, learn: Learn, with_mixers: set[int], longest: int) -> Masks | str:
    """The rules, or why they cannot be read. Upstream is asked for its masks at the far end of the longest context
    (`longest` tokens, or what the model states), where a window of any size shows; chunks then where the last one
    begins; and near the start, as a check."""
    stated = int(getattr(decoder.built.text_config, "max_position_embeddings", 0) or longest)
    far = max(min(stated, longest) - PROBE, 1)
    at = {p: _ask(decoder, taps, learn, p) for p in (far, 1)}
    rules: dict[int, MaskRule] = {}
    additive = False
    for index in sorted(with_mixers):
        mask = at[far][index]
        if mask is None:
            return f"layer {index} gets no dense attention mask from upstream"
        additive = mask.dtype != torch.bool
        start = int(_allowed(mask)[-1].int().argmax())
        if start > 0 and start - 1 not in at:
            at[start - 1] = _ask(decoder, taps, learn, start - 1)
        seen = {p: _allowed(m) for p, masks in at.items() if (m := masks[index]) is not None}
        rule = next((r for r in _guesses(seen, far, start) if _explains(r, seen)), None)
        if rule is None or len(seen) < len(at):
            return f"the attention mask of layer {index} is neither causal, windowed nor chunked"
        rules[index] = rule
    return Masks(rules, additive)


def forgets(decoder: Decoder, taps: Taps, learn: Learn) -> bool:
    """Whether a layer of upstream's cache keeps a window only, while the layer's mask would show more: then what a
    token sees depends on how the prompt was cut."""
    layers = getattr(decoder.new_cache(), "layers", ())
    kept = {i: int(x.sliding_window) for i, x in enumerate(layers) if getattr(x, "is_sliding", False)}
    if not kept:
        return False
    masks = _ask(decoder, taps, learn, max(kept.values()) + PROBE)
    return any((m := masks.get(i)) is not None and int(_allowed(m)[0].sum()) > size for i, size in kept.items())


def _ask(decoder: Decoder, taps: Taps, learn: Learn, past: int) -> dict[int, torch.Tensor | None]:
    """The mask [1, H, PROBE, past + PROBE] that each layer would get for PROBE tokens behind `past` others."""
    device = next(decoder.module.parameters()).device
    positions = torch.arange(past, past + PROBE, device=device)[None]
    record = Record(learn.forms)
    with taps.using(record):
        decoder(
            cache=make_past(decoder.built.text_config, past),
            positions=positions,
            ids=torch.zeros(1, PROBE, dtype=torch.long, device=device),
        )
    shape = (PROBE, past + PROBE)
    given = {index: named.get("attention_mask") for index, named in record.named.items()}
    dense = lambda m: isinstance(m, torch.Tensor) and m.dim() == 4 and tuple(m.shape[-2:]) == shape  # noqa: E731
    return {index: m if dense(m) else None for index, m in given.items()}


def _allowed(mask: torch.Tensor) -> torch.Tensor:
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0


def _guesses(seen: dict[int, torch.Tensor], far: int, start: int) -> list[MaskRule]:
    """`start` is the first key that the last query sees; the query just before a chunk sees all of the one before."""
    guesses = [MaskRule("full"), MaskRule("window", far + PROBE - start)]
    if start > 0:
        guesses.append(MaskRule("chunk", start - int(seen[start - 1][0].int().argmax())))
    return guesses


def _explains(rule: MaskRule, seen: dict[int, torch.Tensor]) -> bool:
    for past, allowed in seen.items():
        query = torch.arange(past, past + PROBE, device=allowed.device)[:, None]
        key = torch.arange(past + PROBE, device=allowed.device)[None]
        if not torch.equal(rule.allowed(query, key), allowed):
            return False
    return True


def as_mask(allowed: torch.Tensor, *, additive: bool, dtype: torch.dtype) -> Any:
    """[B, 1, S, K] in the form upstream's attention expects: boolean, or 0 and the lowest number of `dtype`."""
    allowed = allowed[:, None]
    if not additive:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)
