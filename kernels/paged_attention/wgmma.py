"""Paged attention for many queries with roles: four warps gather pages, two groups of four compute 64 queries each.

The groups run free of each other: while one is in its softmax the other has the matrix units. Inside a group the second
product of a tile runs beside the softmax of the next. Keys are taken from the diagonal downwards, so that only the
first tiles need a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.parts import HALVES, LOG2E
from dz.kernels.common.refuse import off_grid, support
from dz.kernels.common.tuned import Tunable
from dz.kernels.paged_attention._support import supports as shared

TUNE = Tunable(
    "paged_attention/wgmma",
    {"keys": 128, "registers": 72},
    {"default": [{"keys": k, "registers": r} for k, r in ((128, 56), (128, 72), (64, 40), (64, 56))]},
)
ROWS = 64  # queries of a group of warps


@gluon.jit
def _gather(
    k_cache, v_cache, blocks, keys, values, k_full, k_empty, v_full, v_empty, tiles, low, length, group,
    k_block, k_row, k_head, v_block, v_row, v_head,
    D: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Tiles from the last to the first, keys before values, each into the slot that is free."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    at = low + (tiles - 1) * KEYS + k
    coming = gl.load(blocks + at // PAGE, mask=(at < length) & (tiles > 0), other=0)
    for i in range(tiles):
        real = (at < length)[:, None]
        block = coming.to(gl.int64)
        offset = at % PAGE
        at -= KEYS
        coming = gl.load(blocks + at // PAGE, mask=(at >= 0) & (i + 1 < tiles), other=0)
        slot = i % 2
        phase = (i // 2) % 2 ^ 1
        row = (k_cache + block * k_block + offset * k_row + group * k_head)[:, None]
        mbarrier.wait(k_empty.index(slot), phase)
        async_copy.async_copy_global_to_shared(keys.index(slot), row + d, mask=real)
        async_copy.mbarrier_arrive(k_full.index(slot), increment_count=False)
        row = (v_cache + block * v_block + offset * v_row + group * v_head)[:, None]
        mbarrier.wait(v_empty.index(slot), phase)
        async_copy.async_copy_global_to_shared(values.index(slot), row + d, mask=real)
        async_copy.mbarrier_arrive(v_full.index(slot), increment_count=False)


@gluon.jit
def _scores(rows, keys, k_full, i, ROWS: gl.constexpr, KEYS: gl.constexpr, layout: gl.constexpr):
    """The first product of a tile, begun."""
    mbarrier.wait(k_full.index(i % 2), (i // 2) % 2)
    s = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return warpgroup_mma(rows, keys.index(i % 2).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _weigh(
    s, best, total, position, at, scale, window, softcap,
    MASK: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """(weights, factor of what was summed before, best, total) of one tile's scores."""
    if SOFTCAP:
        s = softcap * (1.0 - 2.0 / (gl.exp2(s * (2.885390081777927 * scale / softcap)) + 1.0))
        scale = 1.4426950408889634
    if MASK:
        near = at[None, :] <= position[:, None]
        if WINDOW:
            near = near & (at[None, :] > position[:, None] - window)
        s = gl.where(near, s, float("-inf"))
    top = gl.maximum(best, gl.max(s, 1) * scale)
    keep = gl.exp2(best - top)
    p = gl.exp2(s * scale - top[:, None])
    return p, keep, top, total * keep + gl.sum(p, 1)


@gluon.jit
def _tile(
    rows, keys, values, k_full, k_empty, v_full, v_empty, i, o, p, best, total, position, at, scale, window, softcap,
    ROWS: gl.constexpr, KEYS: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr, p_layout: gl.constexpr,
    MASK: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Tile i's scores and weights beside the second product of tile i - 1."""
    s = _scores(rows, keys, k_full, i, ROWS, KEYS, s_layout)
    slot = (i - 1) % 2
    mbarrier.wait(v_full.index(slot), ((i - 1) // 2) % 2)
    acc = warpgroup_mma(p, values.index(slot), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    w, keep, best, total = _weigh(s, best, total, position, at, scale, window, softcap, MASK, WINDOW, SOFTCAP)
    o, p = warpgroup_mma_wait(0, deps=[acc, p])
    gl.thread_barrier()  # all warps of the group are through with both tiles
    mbarrier.arrive(k_empty.index(i % 2))
    mbarrier.arrive(v_empty.index(slot))
    o = o * gl.convert_layout(keep, gl.SliceLayout(1, o_layout))[:, None]
    return o, gl.convert_layout(w.to(p.dtype), p_layout), best, total


@gluon.jit
def _compute(
    q, out, sinks, rows, keys, values, k_full, k_empty, v_full, v_empty, tiles, masked, low, first, begin, count, shift,
    head, heads, scale, window, softcap, q_row, q_head,
    HALF: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    if tiles > 0:
        r = first + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, flat))[:, None]
        d = gl.arange(0, D, gl.SliceLayout(0, flat))[None, :]
        line = q + (begin + r).to(gl.int64) * q_row + head * q_head
        rows.store(gl.load(line + d, mask=r < count, other=0.0))
        fence_async_shared()
        gl.thread_barrier()
        position = shift + first + HALF * ROWS + gl.arange(0, ROWS, s_rows)
        at = low + (tiles - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
        o = gl.zeros([ROWS, D], gl.float32, o_layout)
        best = gl.full([ROWS], -1e38, gl.float32, s_rows)
        total = gl.zeros([ROWS], gl.float32, s_rows)
        s = _scores(rows, keys, k_full, 0, ROWS, KEYS, s_layout)
        s = warpgroup_mma_wait(0, deps=[s])
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(0))
        w, _keep, best, total = _weigh(s, best, total, position, at, scale, window, softcap, True, WINDOW, SOFTCAP)
        p = gl.convert_layout(w.to(rows.dtype), p_layout)
        for i in range(1, masked):
            o, p, best, total = _tile(
                rows, keys, values, k_full, k_empty, v_full, v_empty, i, o, p, best, total, position, at - i * KEYS,
                scale, window, softcap, ROWS, KEYS, s_layout, o_layout, p_layout, True, WINDOW, SOFTCAP,
            )  # fmt: skip
        for i in range(masked, tiles):
            o, p, best, total = _tile(
                rows, keys, values, k_full, k_empty, v_full, v_empty, i, o, p, best, total, position, at,
                scale, window, softcap, ROWS, KEYS, s_layout, o_layout, p_layout, False, WINDOW, SOFTCAP,
            )  # fmt: skip
        slot = (tiles - 1) % 2
        mbarrier.wait(v_full.index(slot), ((tiles - 1) // 2) % 2)
        acc = warpgroup_mma(p, values.index(slot), o, is_async=True)
        o, p = warpgroup_mma_wait(0, deps=[acc, p])
        share = 1.0 / gl.where(total > 0, total, 1.0)
        if SINKS:
            extra = gl.load(sinks + head) * 1.4426950408889634
            high = gl.maximum(best, extra)
            share = gl.exp2(best - high) / (total * gl.exp2(best - high) + gl.exp2(extra - high))
        o = o * gl.convert_layout(share, gl.SliceLayout(1, o_layout))[:, None]
        rows.store(o.to(rows.dtype))  # through shared memory, so that rows are written whole
        gl.thread_barrier()
        gl.store(out + ((begin + r).to(gl.int64) * heads + head) * D + d, rows.load(flat), mask=r < count)


@gluon.jit
def _kernel(
    q, k_cache, v_cache, table, lengths, cu_q, sinks, out, n_sequences, heads, scale, window, softcap,
    q_row, q_head, k_block, k_row, k_head, v_block, v_row, v_head, t_row,
    GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr,
    BATCH: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SOFTCAP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    head = gl.program_id(0)
    step = gl.num_programs(1) - 1 - gl.program_id(1)
    n = gl.arange(0, BATCH, line)
    starts = gl.load(cu_q + n, mask=n < n_sequences, other=0) // (2 * ROWS) + n
    sequence = gl.sum(((starts <= step) & (n < n_sequences)).to(gl.int32), 0) - 1
    begin = gl.load(cu_q + sequence)
    count = gl.load(cu_q + sequence + 1) - begin
    first = (step - begin // (2 * ROWS) - sequence) * 2 * ROWS
    length = gl.load(lengths + sequence)
    shift = length - count  # the position of the sequence's first query
    last = gl.minimum(shift + first + 2 * ROWS, length)
    low = 0
    if WINDOW:
        low = gl.maximum(shift + first - window + 1, 0) // KEYS * KEYS
    tiles = gl.where(first < count, gl.cdiv(last - low, KEYS), 0)
    masked = gl.minimum(tiles, tiles - (shift + first + 1 - low) // KEYS)  # tiles beyond the first query's position
    if WINDOW:
        masked = tiles
    masked = gl.maximum(masked, 1)
    kind: gl.constexpr = q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = gl.allocate_shared_memory(kind, [2, ROWS, D], swizzled)
    keys = gl.allocate_shared_memory(kind, [2, KEYS, D], swizzled)
    values = gl.allocate_shared_memory(kind, [2, KEYS, D], swizzled)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=128)  # a copy's end counts for each thread that began it
        mbarrier.init(v_full.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    blocks = table + sequence.to(gl.int64) * t_row
    gl.warp_specialize(
        [
            (_compute, (
                q, out, sinks, rows.index(0), keys, values, k_full, k_empty, v_full, v_empty, tiles, masked, low, first,
                begin, count, shift, head, heads, scale, window, softcap, q_row, q_head,
                0, ROWS, D, KEYS, WINDOW, SINKS, SOFTCAP,
            )),
            (_compute, (
                q, out, sinks, rows.index(1), keys, values, k_full, k_empty, v_full, v_empty, tiles, masked, low, first,
                begin, count, shift, head, heads, scale, window, softcap, q_row, q_head,
                1, ROWS, D, KEYS, WINDOW, SINKS, SOFTCAP,
            )),
            (_gather, (
                k_cache, v_cache, blocks, keys, values, k_full, k_empty, v_full, v_empty, tiles, low, length,
                head // GROUP, k_block, k_row, k_head, v_block, v_row, v_head, D, KEYS, PAGE,
            )),
        ],
        [4, 4], [(504 - REGISTERS) // 16 * 8, REGISTERS],
    )  # fmt: skip


def run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_q: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See dz.ops.paged_attention.reference."""
    (tokens, heads, dim), (_, page, groups, _) = q.shape, k_cache.shape
    out, batch = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device), block_table.shape[0]
    if not tokens:
        return out
    cfg = TUNE.pick(q.device)
    with on(q):
        _kernel[(heads, -(-tokens // (2 * ROWS)) + batch)](
            q, k_cache, v_cache, block_table, kv_lengths, cu_q, q if sinks is None else sinks, out,
            batch, heads, scale if softcap else scale * LOG2E, window or 0, softcap or 0.0, q.stride(0), q.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
            GROUP=heads // groups, ROWS=ROWS, D=dim, KEYS=cfg["keys"], PAGE=page, BATCH=power_of_two(batch, 32),
            WINDOW=window is not None, SINKS=sinks is not None, SOFTCAP=softcap is not None,
            REGISTERS=cfg["registers"], num_warps=4,
        )  # fmt: skip
    return out


def supports(args: Mapping[str, Any]) -> Support:
    """Head sizes 64 and 128; queries and cache rows on 16 bytes."""
    dim = args["q"].shape[-1]
    return support(
        shared(args).reason,
        f"head size {dim}; takes 64 and 128" if dim not in (64, 128) else "",
        off_grid(args, ("q", "k_cache", "v_cache")),
    )


KERNEL = Kernel(
    op="paged_attention",
    technique="wgmma",
    summary="warps that gather pages beside two free groups that multiply, on Hopper's asynchronous matrix units",
    run=run,
    requires=Requires(device=("cuda",), arch=(90, 90), dtypes=HALVES, phases=("prefill",)),
    supports=supports,
    interpreter="Gluon programs address the chip's own units",
)
