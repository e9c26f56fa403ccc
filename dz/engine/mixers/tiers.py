"""Which tier holds the mixers: the fastest that proves itself against upstream's own run, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dz.engine.cache.paged import PagedStore
from dz.engine.mixers.gather import Gather, Share
from dz.engine.mixers.isolate import Isolate, NotIsolatable
from dz.engine.mixers.masks import read_masks
from dz.engine.mixers.oracle import ROUNDING, Truth, Walk, by_segments, error, find_truth, positions
from dz.engine.mixers.taps import Taps
from dz.upstream.decoder import FAILURES, Decoder


@dataclass(frozen=True, slots=True)
class Tier:
    """The tier in force. `name` is gather, isolate or serial (isolate with one sequence a forward); `error` is its
    largest relative difference from upstream's own run; `rejected` says why each faster tier was not taken. `whole`
    says that prompts must be computed in one piece."""

    name: str
    run: Any
    error: float
    rejected: tuple[str, ...]
    whole: bool = False


def choose(
    decoder: Decoder, taps: Taps, *, gather: bool, rows: int | None, vocab: int, blocks: int, block_size: int
) -> Tier:
    """The tier of this model on its loaded weights. `gather` False leaves that tier out (the plan, or dynamic rope).

    Raises Refused when upstream's decoder does not run."""
    truth = find_truth(decoder, taps, rows, vocab)
    rejected: list[str] = []
    if truth.whole:
        rejected.append("prompts in chunks: upstream's own cache does not continue a prompt that was cut")
    if truth.forgets:
        rejected.append("gather: upstream's cache drops keys that its mask would show")
    elif gather:
        tier = _try_gather(decoder, taps, truth, rows, rejected, blocks=blocks, block_size=block_size)
        if tier is not None:
            return tier
    else:
        rejected.append("gather: the plan or a rope that depends on the whole batch excludes it")
    isolate = Isolate(decoder, taps, truth.learn)
    try:
        differs = error(by_segments(decoder, truth.walk, rows, isolate.run), truth.hidden)
    except (NotIsolatable, *FAILURES) as e:
        rejected.append(f"isolate in batches: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
    else:
        if differs <= ROUNDING[decoder.built.dtype]:
            return Tier("isolate", isolate, differs, tuple(rejected), truth.whole)
        rejected.append(f"isolate in batches: differs by {differs:.2g} of the largest value from upstream alone")
    return Tier("serial", None, 0.0, tuple(rejected), truth.whole)


def _try_gather(
    decoder: Decoder,
    taps: Taps,
    truth: Truth,
    rows: int | None,
    rejected: list[str],
    *,
    blocks: int,
    block_size: int,
) -> Tier | None:
    device = str(next(decoder.module.parameters()).device)
    try:
        with_mixers = {i for i, layer in enumerate(decoder.built.layers) if taps.mixed(layer)}
        masks = read_masks(decoder, taps, truth.learn, with_mixers, blocks * block_size)
        if isinstance(masks, str):
            rejected.append(f"gather: {masks}")
            return None
        store = PagedStore(blocks=64, block_size=4, device=device)
        got = _by_shares(Gather(decoder, taps, store, masks), truth.walk, rows)
    except FAILURES as e:
        rejected.append(f"gather: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
        return None
    if len(store.keys) != taps.count:
        rejected.append("gather: some mixers keep state that is not keys and values")
        return None
    differs = error(got, truth.hidden)
    if differs > ROUNDING[decoder.built.dtype]:
        rejected.append(f"gather: differs by {differs:.2g} of the largest value from upstream alone")
        return None
    real = PagedStore(blocks=blocks, block_size=block_size, device=device)
    return Tier("gather", Gather(decoder, taps, real, masks), differs, tuple(rejected), truth.whole)


def _by_shares(gather: Gather, walk: Walk, rows: int | None) -> list[torch.Tensor]:
    size = gather.store.block_size
    order = list(range(gather.store.slots // size))[::-1]  # scattered on purpose: descending, interleaved blocks
    held: list[list[int]] = [[] for _ in walk.ids]
    out = []
    for step in walk.steps:
        shares = []
        for i, s, n in step:
            while len(held[i]) * size < s + n:
                held[i].append(order.pop())
            shares.append(Share(held[i], s, walk.ids[i][:, s : s + n], positions(s, n, rows, str(walk.ids[i].device))))
        out.append(gather.run(shares)[0].float())
    return out
