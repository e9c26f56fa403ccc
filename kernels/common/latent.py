"""Absorbed latent attention with roles, for rows chosen by an index or paged ones: four warps gather, eight compute.

Shared memory holds the queries and two tiles of 64 rows. While one tile is multiplied the other is gathered, and the
first product of a tile starts before the second of the tile before it has ended, so that only the softmax is waited
for. Programs stay and take one item (a query, a group of heads, a stretch of its rows) after the other; the gathering
runs ahead over the end of an item.

Packed rows (dz.ops.latent_fp8) become fp16 codes under one power of two a row, which the softmax takes in: with row
t's power c_t, weights are exp2(logit_t + log2 c_t), values are codes, and the sum of weights divides by c_t."""

from __future__ import annotations

from dataclasses import dataclass

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

from dz.kernels.common.launch import on
from dz.kernels.common.parts import LOG2E, combine
from dz.kernels.common.tuned import processors

HEADS, KEYS, RANK, ROPE = 64, 64, 512, 64
# Four codes to four fp16, times a factor.
UNPACK = gl.constexpr("""{
.reg .b16 lo, hi;
mov.b32 {lo, hi}, $2;
cvt.rn.f16x2.e4m3x2 $0, lo;
cvt.rn.f16x2.e4m3x2 $1, hi;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $4;
}""")


@gluon.jit
def _item(item, lengths, groups, splits, picks, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """(query, group of heads, split, first and last row, end of its tiles: at least one) of a work item; the groups of
    a query are neighbours."""
    query = (item // groups // splits).to(gl.int64)
    if PAGE > 0:
        picks = gl.load(lengths + query)
    split = item // groups % splits
    first = split * (gl.cdiv(gl.cdiv(picks, KEYS), splits) * KEYS)
    last = gl.minimum(first + gl.cdiv(gl.cdiv(picks, KEYS), splits) * KEYS, picks)
    return query, item % groups, split, first, last, gl.maximum(last, first + 1)


@gluon.jit
def _row(table, at, last, n_rows, PAGE: gl.constexpr):
    """The cache row of each position, or -1."""
    if PAGE > 0:
        block = gl.load(table + at // PAGE, mask=at < last, other=0).to(gl.int64)
        return gl.where(at < last, block * PAGE + at % PAGE, -1)
    else:
        index = gl.load(table + at, mask=at < last, other=-1)
        return gl.where(index < n_rows, index, -1).to(gl.int64)


@gluon.jit
def _seen(table, at, last, n_rows, PAGE: gl.constexpr):
    """1 where there is a row."""
    if PAGE > 0:
        return (at < last).to(gl.int32)
    else:
        index = gl.load(table + at, mask=at < last, other=-1)
        return ((index >= 0) & (index < n_rows)).to(gl.int32)


@gluon.jit
def _gather(
    kv, table, lengths, latents, ropes, powers, full, empty, items, groups, splits, n_rows, picks, kv_row, t_row,
    KEYS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The rows of each tile into the slot that is free, 16 bytes a thread at a time; rows that are none become 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    c = gl.arange(0, RANK, gl.SliceLayout(0, layout))[None, :]
    r = RANK + gl.arange(0, ROPE, gl.SliceLayout(0, layout))[None, :]
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        query, _group, _split, first, last, end = _item(item, lengths, groups, splits, picks, KEYS, PAGE)
        chosen = table + query * t_row
        coming = _row(chosen, first + k, last, n_rows, PAGE)
        for start in range(first, end, KEYS):
            index = coming
            coming = _row(chosen, start + KEYS + k, last, n_rows, PAGE)
            real = (index >= 0)[:, None]
            row = (kv + gl.maximum(index, 0) * kv_row)[:, None]
            slot = tile % 2
            mbarrier.wait(empty.index(slot), (tile // 2) % 2 ^ 1)
            async_copy.async_copy_global_to_shared(latents.index(slot), row + c, mask=real)
            async_copy.async_copy_global_to_shared(ropes.index(slot), row + r, mask=real)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            tile += 1


@gluon.jit
def _gather_packed(
    kv, table, lengths, latents, ropes, powers, full, empty, items, groups, splits, n_rows, picks, kv_row, t_row,
    KEYS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """As _gather for packed rows, read ahead into registers. A row's power of two is that at or above its largest
    scale; codes are stored times scale / power, the rotated part divided by the power (which is exact)."""
    cube: gl.constexpr = gl.BlockedLayout([1, 1, 16], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, cube))
    SCALES: gl.constexpr = RANK // 128
    k = gl.arange(0, KEYS, rows)
    g = gl.arange(0, SCALES, gl.SliceLayout(0, gl.SliceLayout(2, cube)))[None, :]
    c = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, cube)))[None, None, :]
    r = gl.arange(0, ROPE, gl.SliceLayout(0, flat))[None, :]
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        query, _group, _split, first, last, end = _item(item, lengths, groups, splits, picks, KEYS, PAGE)
        chosen = table + query * t_row
        coming = _row(chosen, first + k, last, n_rows, PAGE)
        for start in range(first, end, KEYS):
            index = coming
            coming = _row(chosen, start + KEYS + k, last, n_rows, PAGE)
            real = index >= 0
            row = kv + gl.maximum(index, 0) * kv_row
            scale = gl.load((row + RANK).to(gl.pointer_type(gl.float32))[:, None] + g, mask=real[:, None], other=0.0)
            codes = gl.load((row[:, None] + g * 128)[:, :, None] + c, mask=real[:, None, None], other=0)
            tail = gl.convert_layout(row + RANK + SCALES * 4, gl.SliceLayout(1, flat))
            tail = tail.to(gl.pointer_type(gl.bfloat16))[:, None] + r
            rope = gl.load(tail, mask=gl.convert_layout(real, gl.SliceLayout(1, flat))[:, None], other=0.0)
            exponent = gl.ceil(gl.log2(gl.maximum(gl.max(scale, 1), 1e-30)))
            ratio = (scale * gl.exp2(-exponent)[:, None]).to(gl.float16)
            slot = tile % 2
            mbarrier.wait(empty.index(slot), (tile // 2) % 2 ^ 1)
            wide = gl.inline_asm_elementwise(
                UNPACK, "=&r,=&r,r,r,r", [codes, ratio[:, :, None]], dtype=gl.float16, is_pure=True, pack=4
            )
            latents.index(slot).store(wide.reshape([KEYS, RANK]))
            shrink = gl.convert_layout(gl.exp2(-exponent), gl.SliceLayout(1, flat))[:, None]
            ropes.index(slot).store((rope.to(gl.float32) * shrink).to(gl.bfloat16))
            powers.index(slot).store(exponent)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(slot))
            tile += 1


@gluon.jit
def _scores(
    q_latent, q_rope, latents, ropes, full, tile, HEADS: gl.constexpr, KEYS: gl.constexpr, layout: gl.constexpr
):
    """The first product of a tile, begun: two groups of matrix operations."""
    slot = tile % 2
    mbarrier.wait(full.index(slot), (tile // 2) % 2)
    s = gl.zeros([HEADS, KEYS], gl.float32, layout)
    s = warpgroup_mma(q_rope, ropes.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma(q_latent, latents.index(slot).permute((1, 0)), s, is_async=True)


@gluon.jit
def _weigh(
    s, seen, o, best, sums, weights, powers, tile, scale, s_layout: gl.constexpr, o_layout: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: its weights go to shared memory; (o rescaled, best, sums). `scale` [HEADS]."""
    s = s * scale[:, None]
    if PACKED:
        exponent = powers.index(tile % 2).load(gl.SliceLayout(0, s_layout))
        s = s * gl.exp2(exponent)[None, :] + exponent[None, :]
    s = gl.where((seen > 0)[None, :], s, float("-inf"))
    top = gl.maximum(best, gl.max(s, 1))
    keep = gl.exp2(best - top)
    p = gl.exp2(s - top[:, None])
    weights.store(p.to(weights.dtype))
    o = o * gl.convert_layout(keep, gl.SliceLayout(1, o_layout))[:, None]
    fence_async_shared()
    gl.thread_barrier()
    if PACKED:
        p = p * gl.exp2(-exponent)[None, :]
    return o, top, sums * keep[:, None] + p


@gluon.jit
def _compute(
    q, table, lengths, sink, out, lse, partial, latents, ropes, powers, full, empty, q_latent, q_rope, staged, weights,
    items, groups, splits, n_rows, picks, heads, scale, q_row, q_head, t_row,
    HEADS: gl.constexpr, KEYS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, SINK: gl.constexpr,
    WHOLE: gl.constexpr, PACKED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    k = gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    h = gl.arange(0, HEADS, gl.SliceLayout(1, flat))[:, None]
    c = gl.arange(0, RANK, gl.SliceLayout(0, flat))[None, :]
    r = RANK + gl.arange(0, ROPE, gl.SliceLayout(0, flat))[None, :]
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        query, group, split, first, last, end = _item(item, lengths, groups, splits, picks, KEYS, PAGE)
        line = q + query * q_row + (group * HEADS + h) * q_head
        mine = group * HEADS + h < heads
        x = gl.load(line + c, mask=mine, other=0.0)
        y = gl.load(line + r, mask=mine, other=0.0)
        factor = gl.full([HEADS], scale, gl.float32, s_rows)
        if PACKED:  # by rows' powers of two into the range of fp16
            rise = gl.floor(gl.log2(gl.maximum(gl.max(gl.abs(x.to(gl.float32)), 1), 1e-30)))
            x = x.to(gl.float32) * gl.exp2(-rise)[:, None]
            y = (y.to(gl.float32) * gl.exp2(-rise)[:, None]).to(y.dtype)
            factor = factor * gl.exp2(gl.convert_layout(rise, s_rows))
        q_latent.store(x.to(q_latent.dtype))
        q_rope.store(y)
        fence_async_shared()
        gl.thread_barrier()
        chosen = table + query * t_row
        o = gl.zeros([HEADS, RANK], gl.float32, o_layout)
        best = gl.full([HEADS], -1e38, gl.float32, s_rows)
        sums = gl.zeros([HEADS, KEYS], gl.float32, s_layout)
        seen = _seen(chosen, first + k, last, n_rows, PAGE)
        s = _scores(q_latent, q_rope, latents, ropes, full, tile, HEADS, KEYS, s_layout)
        for start in range(first + KEYS, end, KEYS):
            slot = tile % 2
            done = warpgroup_mma_wait(0, deps=[s])
            o, best, sums = _weigh(
                done, seen, o, best, sums, weights, powers, tile, factor, s_layout, o_layout, PACKED
            )  # fmt: skip
            acc = warpgroup_mma(weights, latents.index(slot), o, is_async=True)
            tile += 1
            s = _scores(q_latent, q_rope, latents, ropes, full, tile, HEADS, KEYS, s_layout)
            seen = _seen(chosen, start + k, last, n_rows, PAGE)
            o = warpgroup_mma_wait(2, deps=[acc])
            gl.thread_barrier()  # both groups of warps are through with the tile
            mbarrier.arrive(empty.index(slot))
        done = warpgroup_mma_wait(0, deps=[s])
        o, best, sums = _weigh(done, seen, o, best, sums, weights, powers, tile, factor, s_layout, o_layout, PACKED)
        acc = warpgroup_mma(weights, latents.index(tile % 2), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(tile % 2))
        tile += 1
        total = gl.sum(sums, 1)
        some = total > 0
        head = group * HEADS + gl.arange(0, HEADS, s_rows)
        logs = gl.where(some, best + gl.log2(gl.where(some, total, 1.0)), float("-inf"))
        share = 1.0 / gl.where(some, total, 1.0)
        if WHOLE:
            gl.store(lse + query * heads + head, logs * 0.6931471805599453, mask=head < heads)
            if SINK:
                extra = gl.load(sink + head, mask=head < heads, other=0.0) * 1.4426950408889634
                high = gl.maximum(best, extra)
                shrink = gl.exp2(best - high)
                share = shrink / (total * shrink + gl.exp2(extra - high))
            o = o * gl.convert_layout(share, gl.SliceLayout(1, o_layout))[:, None]
            staged.store(o.to(staged.dtype))  # where the queries were, so that rows are written whole
            gl.thread_barrier()
            gl.store(out + (query * heads + group * HEADS + h) * RANK + c, staged.load(flat), mask=mine)
            gl.thread_barrier()
        else:
            place = (query * splits + split) * heads
            gl.store(lse + place + head, logs, mask=head < heads)
            o = o * gl.convert_layout(share, gl.SliceLayout(1, o_layout))[:, None]
            row = group * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, o_layout))[:, None]
            column = gl.arange(0, RANK, gl.SliceLayout(0, o_layout))[None, :]
            gl.store(partial + (place + row) * RANK + column, o, mask=row < heads)


@gluon.jit
def _kernel(
    q, kv, table, lengths, sink, out, lse, partial, items, groups, splits, n_rows, picks, heads, scale,
    q_row, q_head, kv_row, t_row,
    HEADS: gl.constexpr, KEYS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, SINK: gl.constexpr,
    WHOLE: gl.constexpr, PACKED: gl.constexpr, PAGE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = gl.float16 if PACKED else q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    latents = gl.allocate_shared_memory(kind, [2, KEYS, RANK], swizzled)
    ropes = gl.allocate_shared_memory(q.dtype.element_ty, [2, KEYS, ROPE], swizzled)
    powers = gl.allocate_shared_memory(gl.float32, [2, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_latent = gl.allocate_shared_memory(kind, [HEADS, RANK], swizzled)
    q_rope = gl.allocate_shared_memory(q.dtype.element_ty, [HEADS, ROPE], swizzled)
    weights = gl.allocate_shared_memory(kind, [HEADS, KEYS], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1 if PACKED else 128)  # a copy's end counts for each thread that began it
        mbarrier.init(empty.index(i), count=1)
    staged = q_latent._reinterpret(q.dtype.element_ty, [HEADS, RANK], swizzled)
    gl.warp_specialize(
        [
            (_compute, (
                q, table, lengths, sink, out, lse, partial, latents, ropes, powers, full, empty, q_latent, q_rope,
                staged, weights, items, groups, splits, n_rows, picks, heads, scale, q_row, q_head, t_row,
                HEADS, KEYS, RANK, ROPE, SINK, WHOLE, PACKED, PAGE,
            )),
            (_gather_packed if PACKED else _gather, (
                kv, table, lengths, latents, ropes, powers, full, empty, items, groups, splits, n_rows, picks,
                kv_row, t_row, KEYS, RANK, ROPE, PAGE,
            )),
        ],
        [4], [REGISTERS],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """What `attend` takes: q [S, H, 576]; kv rows [T, 576] or packed; `table` [S, n] int32 of rows, or with a `page`
    of blocks of that many rows, `lengths` [S] then says how many a query has; `scale` of the logits; `sink` [H]."""

    q: Tensor
    kv: Tensor
    table: Tensor
    scale: float
    sink: Tensor | None = None
    lengths: Tensor | None = None
    page: int = 0


def attend(a: Latent, *, registers: int) -> tuple[Tensor, Tensor]:
    """(out [S, H, 512], lse [S, H] fp32, natural); `registers` of a gathering thread."""
    (queries, heads, _), q, packed, units = a.q.shape, a.q, a.kv.dtype == torch.uint8, processors(a.q.device)
    out = torch.empty(queries, heads, RANK, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    if not queries:
        return out, lse
    groups, most = -(-heads // HEADS), a.table.shape[1] * max(a.page, 1)
    tiles = -(-most // KEYS)
    splits = -(-tiles // -(-tiles // min(tiles, max(1, units // (queries * groups)))))
    items, whole = queries * groups * splits, splits == 1
    partial = out if whole else torch.empty(queries, splits, heads, RANK, dtype=torch.float32, device=q.device)
    logs = lse if whole else torch.empty(queries, splits, heads, dtype=torch.float32, device=q.device)
    with on(q):
        _kernel[(min(items, units),)](
            q, a.kv, a.table, a.table if a.lengths is None else a.lengths, lse if a.sink is None else a.sink, out, logs,
            partial, items, groups, splits, a.kv.shape[0], most, heads, a.scale * LOG2E,
            q.stride(0), q.stride(1), a.kv.stride(0), a.table.stride(0),
            HEADS=HEADS, KEYS=KEYS, RANK=RANK, ROPE=ROPE, SINK=a.sink is not None, WHOLE=whole, PACKED=packed,
            PAGE=a.page, REGISTERS=registers, num_warps=8,
        )  # fmt: skip
        if not whole:
            combine(partial, logs, a.sink, out, lse)
    return out, lse
