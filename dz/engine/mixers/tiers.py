"""Which tier holds the mixers: the fastest that proves itself against upstream's own run, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dz.engine.cache.paged import PagedStore
from dz.engine.mixers.gather import Gather, Share
from dz.engine.mixers.isolate import Isolate, NotIsolatable, Segment, serial
from dz.engine.mixers.masks import read_masks
from dz.engine.mixers.taps import Learn, Taps
from dz.upstream.cache import new_cache
from dz.upstream.decoder import Decoder

# Largest |difference| of final hidden states, relative to their largest value, that rounding explains: 1e3 ulp of the
# dtype for a whole network (batched and single products sum in another order).
ROUNDING = {torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
PROMPTS = (9, 3, 13)
DECODES = 3


@dataclass(frozen=True, slots=True)
class Tier:
    """The tier in force. `name` is gather, isolate or serial (isolate with one sequence a forward); `error` is its
    largest relative difference from upstream's own run; `rejected` says why each faster tier was not taken."""

    name: str
    run: Any
    error: float
    rejected: tuple[str, ...]


@dataclass(slots=True)
class _Walk:
    """The probe: sequences of different lengths that prefill in chunks while others decode."""

    ids: list[torch.Tensor]
    steps: list[list[tuple[int, int, int]]]


def choose(
    decoder: Decoder, taps: Taps, *, gather: bool, rows: int | None, vocab: int, blocks: int, block_size: int
) -> Tier:
    """The tier of this model on its loaded weights. `gather` False leaves that tier out (the plan, or dynamic rope)."""
    device = str(next(decoder.module.parameters()).device)
    learn = Learn()
    walk = _walk(vocab, device)
    with taps.using(learn):
        decoder(
            cache=new_cache(decoder.built.text_config), positions=_positions(0, 2, rows, device), ids=walk.ids[0][:, :2]
        )
    truth = _by_segments(decoder, walk, rows, lambda segs: serial(decoder, taps, segs))
    rejected: list[str] = []
    isolate = Isolate(decoder, taps, learn)
    if gather:
        tier = _try_gather(decoder, taps, learn, walk, truth, rows, rejected, blocks=blocks, block_size=block_size)
        if tier is not None:
            return tier
    else:
        rejected.append("gather: the plan or a rope that depends on the whole batch excludes it")
    try:
        error = _error(_by_segments(decoder, walk, rows, isolate.run), truth)
    except (NotIsolatable, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as e:
        rejected.append(f"isolate in batches: {type(e).__name__}: {e}")
    else:
        if error <= ROUNDING[decoder.built.dtype]:
            return Tier("isolate", isolate, error, tuple(rejected))
        rejected.append(f"isolate in batches: differs by {error:.2g} of the largest value from upstream alone")
    return Tier("serial", None, 0.0, tuple(rejected))


def _try_gather(
    decoder: Decoder,
    taps: Taps,
    learn: Learn,
    walk: _Walk,
    truth: list[torch.Tensor],
    rows: int | None,
    rejected: list[str],
    *,
    blocks: int,
    block_size: int,
) -> Tier | None:
    device = str(next(decoder.module.parameters()).device)
    try:
        with_mixers = {i for i, layer in enumerate(decoder.built.layers) if taps.mixed(layer)}
        masks = read_masks(decoder, taps, learn, with_mixers, blocks * block_size)
        if isinstance(masks, str):
            rejected.append(f"gather: {masks}")
            return None
        store = PagedStore(blocks=64, block_size=4, device=device)
        got = _by_shares(Gather(decoder, taps, store, masks), walk, rows)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as e:
        rejected.append(f"gather: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
        return None
    if len(store.keys) != taps.count:
        rejected.append("gather: some mixers keep state that is not keys and values")
        return None
    error = _error(got, truth)
    if error > ROUNDING[decoder.built.dtype]:
        rejected.append(f"gather: differs by {error:.2g} of the largest value from upstream alone")
        return None
    real = PagedStore(blocks=blocks, block_size=block_size, device=device)
    return Tier("gather", Gather(decoder, taps, real, masks), error, tuple(rejected))


def _walk(vocab: int, device: str) -> _Walk:
    random = torch.Generator().manual_seed(20)
    ids = [torch.randint(0, vocab, (1, n + DECODES), generator=random).to(device) for n in PROMPTS]
    a, b, c = PROMPTS
    steps = [[(0, 0, a), (1, 0, 2)], [(0, a, 1), (1, 2, b - 2), (2, 0, 5)], [(0, a + 1, 1), (1, b, 1), (2, 5, c - 5)]]
    steps.append([(0, a + 2, 1), (1, b + 1, 1), (2, c, 1)])
    steps.append([(1, b + 2, 1), (2, c + 1, 1)])
    steps.append([(2, c + 2, 1)])
    return _Walk(ids, steps)


def _positions(start: int, n: int, rows: int | None, device: str) -> torch.Tensor:
    line = torch.arange(start, start + n, device=device)[None]
    return line if rows is None else line.expand(rows, 1, n)


def _by_segments(decoder: Decoder, walk: _Walk, rows: int | None, run: Any) -> list[torch.Tensor]:
    caches = [new_cache(decoder.built.text_config) for _ in walk.ids]
    out = []
    for step in walk.steps:
        segments = [
            Segment(caches[i], walk.ids[i][:, s : s + n], _positions(s, n, rows, str(walk.ids[i].device)))
            for i, s, n in step
        ]
        out.append(run(segments)[0].float())
    return out


def _by_shares(gather: Gather, walk: _Walk, rows: int | None) -> list[torch.Tensor]:
    size = gather.store.block_size
    order = list(range(gather.store.slots // size))[::-1]  # scattered on purpose: descending, interleaved blocks
    held: list[list[int]] = [[] for _ in walk.ids]
    out = []
    for step in walk.steps:
        shares = []
        for i, s, n in step:
            while len(held[i]) * size < s + n:
                held[i].append(order.pop())
            shares.append(Share(held[i], s, walk.ids[i][:, s : s + n], _positions(s, n, rows, str(walk.ids[i].device))))
        out.append(gather.run(shares)[0].float())
    return out


def _error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if g.shape != w.shape or not torch.isfinite(g).all():
            return float("inf")
        worst = max(worst, float((g - w).abs().max() / w.abs().max().clamp(min=1e-6)))
    return worst
