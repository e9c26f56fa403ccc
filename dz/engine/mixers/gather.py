"""Tier gather: keys and values live in the block pool; upstream's attention runs once for the whole batch under a mask.

Mixed batches are packed [1, T] with a block-diagonal mask; pure decode is [B, 1] over padded contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dz.engine.cache.paged import PagedStore, StepIndex
from dz.engine.mixers.masks import MaskRule, Masks, as_mask
from dz.engine.mixers.taps import Call, Taps
from dz.upstream.cache import make_facade
from dz.upstream.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's share of a step: its blocks, its tokens `ids` [1, n] from position `start`, rotary `positions`."""

    blocks: list[int]
    start: int
    ids: torch.Tensor
    positions: torch.Tensor

    @property
    def count(self) -> int:
        """New tokens."""
        return self.ids.shape[1]

    @property
    def length(self) -> int:
        """Context after the step."""
        return self.start + self.count


class Gather:
    """Runs steps over the pool."""

    def __init__(self, decoder: Decoder, taps: Taps, store: PagedStore, masks: Masks) -> None:
        self.decoder, self.taps, self.store, self.masks = decoder, taps, store, masks
        self.facade = make_facade(store, decoder.built.text_config)

    def run(self, shares: list[Share]) -> torch.Tensor:
        """Hidden states [1, T, D] of all shares in their order."""
        if len(shares) > 1 and all(s.count == 1 for s in shares):
            return self._decode(shares)
        hidden = self._packed(shares)
        if len(shares) == 1 or bool(torch.isfinite(hidden).all()):
            return hidden
        # a masked key weighs 0, and 0 times NaN is NaN: one sequence's would be everybody's
        return torch.cat([self._packed([s]) for s in shares], 1)

    def alone(self, share: Share, given: dict[str, Any]) -> torch.Tensor:
        """A whole prompt in one piece with arguments captured from upstream (images): its own masks stay in force."""
        self.store.step = self._index([share], rows=0)
        with self.taps.using(None):
            return self.decoder(cache=self.facade, positions=share.positions, given=given)

    def _packed(self, shares: list[Share]) -> torch.Tensor:
        self.store.step = self._index(shares, rows=0)
        device = shares[0].ids.device
        query = torch.cat([torch.arange(s.start, s.length, device=device) for s in shares])
        owner = torch.cat([torch.full((s.count,), i, device=device) for i, s in enumerate(shares)])
        key = torch.cat([torch.arange(s.length, device=device) for s in shares])
        holder = torch.cat([torch.full((s.length,), i, device=device) for i, s in enumerate(shares)])
        same = owner[:, None] == holder[None]
        lone = shares[0] if len(shares) == 1 else None

        def mask(rule: MaskRule) -> Any:
            causal = lone is not None and (lone.count == 1 or (lone.start == 0 and not self.masks.additive))
            if lone is not None and causal and rule.trivial(lone.length):
                return None  # all keys are visible, or upstream's attention is causal by itself
            return self._form((same & rule.allowed(query[:, None], key[None]))[None])

        ids = torch.cat([s.ids for s in shares], 1)
        positions = torch.cat([s.positions for s in shares], -1)
        with self.taps.using(_Masked(self.masks.rules, mask)):
            return self.decoder(cache=self.facade, positions=positions, ids=ids)

    def _decode(self, shares: list[Share]) -> torch.Tensor:
        self.store.step = self._index(shares, rows=len(shares))
        device = shares[0].ids.device
        lengths = torch.tensor([s.length for s in shares], device=device)
        longest = int(max(s.length for s in shares))
        key = torch.arange(longest, device=device)
        query = (lengths - 1)[:, None, None]
        level = all(s.length == longest for s in shares)

        def mask(rule: MaskRule) -> Any:
            if level and rule.trivial(longest):
                return None
            return self._form(rule.allowed(query, key[None, None]))

        ids = torch.cat([s.ids for s in shares], 0)
        positions = torch.cat([s.positions for s in shares], -2)
        with self.taps.using(_Masked(self.masks.rules, mask)):
            return self.decoder(cache=self.facade, positions=positions, ids=ids).transpose(0, 1)

    def _form(self, allowed: torch.Tensor) -> Any:
        return as_mask(allowed, additive=self.masks.additive, dtype=self.decoder.built.dtype)

    def _index(self, shares: list[Share], *, rows: int) -> StepIndex:
        device, store = self.store.device, self.store
        write = [x for s in shares for x in store.slots_of(s.blocks, s.start, s.length)]
        span = None
        if len(shares) == 1:
            s = shares[0]
            used = s.blocks[: -(-s.length // store.block_size)]
            if used == list(range(used[0], used[0] + len(used))):
                span = (used[0] * store.block_size, s.length)
        context = [[] if span else store.slots_of(s.blocks, 0, s.length) for s in shares]
        longest = max(len(c) for c in context)
        if rows:
            context = [c + [c[0]] * (longest - len(c)) for c in context]
        read = torch.tensor([x for c in context for x in c], dtype=torch.long, device=device)
        return StepIndex(
            torch.tensor(write, dtype=torch.long, device=device), read.view(rows, -1) if rows else read, rows, span
        )


class _Masked:
    """Hands each layer the mask of its rule; equal rules share one mask a step."""

    def __init__(self, rules: dict[int, MaskRule], build: Any) -> None:
        self.rules, self.build = rules, build
        self.made: dict[MaskRule, Any] = {}

    def layer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """Replace the mask and run the layer."""
        rule = self.rules.get(index)
        if rule is not None:
            if rule not in self.made:
                self.made[rule] = self.build(rule)
            named["attention_mask"] = self.made[rule]
        return call(hidden, named)

    def mixer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """Run it."""
        return call(hidden, named)
