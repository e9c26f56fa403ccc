"""Latent attention over chosen rows with roles: four warps gather rows, eight compute, both at once.

Shared memory holds the queries and two tiles of 64 rows. While one tile is multiplied the other is gathered, and the
first product of a tile starts before the second of the tile before it has ended, so that only the softmax is waited
for. Programs stay and take one query after the other; the gathering runs ahead over the end of a query."""

# A launch takes more than the function does:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

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
from dz.kernels.common.launch import on
from dz.kernels.common.refuse import dtypes, one_device, same_dtype, support, unknown
from dz.kernels.common.tuned import Tunable, processors
from dz.kernels.sparse_mla._parts import HALVES, LOG2E

TUNE = Tunable(
    "sparse_mla/wgmma", {"gather_registers": 56}, {"default": [{"gather_registers": r} for r in (40, 56, 72)]}
)
HEADS, KEYS, RANK, ROPE, GATHER_WARPS = 64, 64, 512, 64, 4


@gluon.jit
def _gather(
    kv, indices, latents, ropes, full, empty, items, groups, n_rows, picks, kv_row, i_row,
    KEYS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """The rows of each tile into the slot that is free, 16 bytes a thread at a time; rows that are none become 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    c = gl.arange(0, RANK, gl.SliceLayout(0, layout))[None, :]
    r = RANK + gl.arange(0, ROPE, gl.SliceLayout(0, layout))[None, :]
    tiles = gl.cdiv(picks, KEYS)
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        chosen = indices + (item // groups).to(gl.int64) * i_row
        coming = gl.load(chosen + k, mask=k < picks, other=-1)
        for i in range(tiles):
            index = coming
            at = (i + 1) * KEYS + k
            coming = gl.load(chosen + at, mask=at < picks, other=-1)
            real = (index >= 0) & (index < n_rows)
            row = (kv + gl.where(real, index, 0).to(gl.int64) * kv_row)[:, None]
            slot = tile % 2
            mbarrier.wait(empty.index(slot), (tile // 2) % 2 ^ 1)
            async_copy.async_copy_global_to_shared(latents.index(slot), row + c, mask=real[:, None])
            async_copy.async_copy_global_to_shared(ropes.index(slot), row + r, mask=real[:, None])
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
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
def _weigh(s, index, o, best, sums, weights, n_rows, scale, o_layout: gl.constexpr):
    """One step of the online softmax: its weights go to shared memory; (o rescaled, best, sums)."""
    s = gl.where(((index >= 0) & (index < n_rows))[None, :], s * scale, float("-inf"))
    top = gl.maximum(best, gl.max(s, 1))
    keep = gl.exp2(best - top)
    p = gl.exp2(s - top[:, None])
    weights.store(p.to(weights.dtype))
    o = o * gl.convert_layout(keep, gl.SliceLayout(1, o_layout))[:, None]
    fence_async_shared()
    gl.thread_barrier()
    return o, top, sums * keep[:, None] + p


@gluon.jit
def _compute(
    q, indices, sink, out, lse, latents, ropes, full, empty, q_latent, q_rope, weights,
    items, groups, n_rows, picks, heads, scale, q_row, q_head, i_row,
    HEADS: gl.constexpr, KEYS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    k = gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    h = gl.arange(0, HEADS, gl.SliceLayout(1, flat))[:, None]
    c = gl.arange(0, RANK, gl.SliceLayout(0, flat))[None, :]
    r = RANK + gl.arange(0, ROPE, gl.SliceLayout(0, flat))[None, :]
    tiles = gl.cdiv(picks, KEYS)
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        query = (item // groups).to(gl.int64)
        first = item % groups * HEADS
        line = q + query * q_row + (first + h) * q_head
        q_latent.store(gl.load(line + c))
        q_rope.store(gl.load(line + r))
        fence_async_shared()
        gl.thread_barrier()
        chosen = indices + query * i_row
        o = gl.zeros([HEADS, RANK], gl.float32, o_layout)
        best = gl.full([HEADS], -1e38, gl.float32, s_rows)
        sums = gl.zeros([HEADS, KEYS], gl.float32, s_layout)
        index = gl.load(chosen + k, mask=k < picks, other=-1)
        s = _scores(q_latent, q_rope, latents, ropes, full, tile, HEADS, KEYS, s_layout)
        for i in range(1, tiles):
            slot = tile % 2
            done = warpgroup_mma_wait(0, deps=[s])
            o, best, sums = _weigh(done, index, o, best, sums, weights, n_rows, scale, o_layout)
            acc = warpgroup_mma(weights, latents.index(slot), o, is_async=True)
            tile += 1
            s = _scores(q_latent, q_rope, latents, ropes, full, tile, HEADS, KEYS, s_layout)
            index = gl.load(chosen + i * KEYS + k, mask=i * KEYS + k < picks, other=-1)
            o = warpgroup_mma_wait(2, deps=[acc])
            gl.thread_barrier()  # both groups of warps are through with the tile
            mbarrier.arrive(empty.index(slot))
        done = warpgroup_mma_wait(0, deps=[s])
        o, best, sums = _weigh(done, index, o, best, sums, weights, n_rows, scale, o_layout)
        acc = warpgroup_mma(weights, latents.index(tile % 2), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(tile % 2))
        tile += 1
        total = gl.sum(sums, 1)
        some = total > 0
        head = first + gl.arange(0, HEADS, s_rows)
        logs = gl.where(some, best + gl.log2(gl.where(some, total, 1.0)), float("-inf"))
        gl.store(lse + query * heads + head, logs * 0.6931471805599453)
        share = 1.0 / gl.where(some, total, 1.0)
        if SINK:
            extra = gl.load(sink + head) * 1.4426950408889634
            high = gl.maximum(best, extra)
            shrink = gl.exp2(best - high)
            share = shrink / (total * shrink + gl.exp2(extra - high))
        o = o * gl.convert_layout(share, gl.SliceLayout(1, o_layout))[:, None]
        q_latent.store(o.to(q_latent.dtype))  # through shared memory, so that rows are written whole
        gl.thread_barrier()
        gl.store(out + (query * heads + first + h) * RANK + c, q_latent.load(flat))
        gl.thread_barrier()


@gluon.jit
def _kernel(
    q, kv, indices, sink, out, lse, items, groups, n_rows, picks, heads, scale, q_row, q_head, kv_row, i_row,
    HEADS: gl.constexpr, KEYS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, SINK: gl.constexpr,
    GATHER_WARPS: gl.constexpr, GATHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    latents = gl.allocate_shared_memory(kind, [2, KEYS, RANK], swizzled)
    ropes = gl.allocate_shared_memory(kind, [2, KEYS, ROPE], swizzled)
    q_latent = gl.allocate_shared_memory(kind, [HEADS, RANK], swizzled)
    q_rope = gl.allocate_shared_memory(kind, [HEADS, ROPE], swizzled)
    weights = gl.allocate_shared_memory(kind, [HEADS, KEYS], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=32 * GATHER_WARPS)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_compute, (
                q, indices, sink, out, lse, latents, ropes, full, empty, q_latent, q_rope, weights,
                items, groups, n_rows, picks, heads, scale, q_row, q_head, i_row, HEADS, KEYS, RANK, ROPE, SINK,
            )),
            (_gather, (
                kv, indices, latents, ropes, full, empty, items, groups, n_rows, picks, kv_row, i_row, KEYS, RANK, ROPE,
            )),
        ],
        [GATHER_WARPS], [GATHER_REGISTERS],
    )  # fmt: skip


def run(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, value_dim: int = 512, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See dz.ops.sparse_mla.reference."""
    queries, heads, _ = q.shape
    out = torch.empty(queries, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    q, kv, indices = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, kv, indices))
    items = queries * heads // HEADS
    if items:
        with on(q):
            _kernel[(min(items, processors(q.device)),)](
                q, kv, indices, lse if sink is None else sink, out, lse, items, heads // HEADS, kv.shape[0],
                indices.shape[1], heads, scale * LOG2E, q.stride(0), q.stride(1), kv.stride(0), indices.stride(0),
                HEADS=HEADS, KEYS=KEYS, RANK=RANK, ROPE=ROPE, SINK=sink is not None, GATHER_WARPS=GATHER_WARPS,
                GATHER_REGISTERS=TUNE.pick(q.device)["gather_registers"], num_warps=8,
            )  # fmt: skip
    return out, lse


def supports(args: Mapping[str, Any]) -> Support:
    """Latents of 512 with 64 rotated channels, whole groups of 64 heads, caches in q's dtype, rows on 16 bytes."""
    q, kv, rank, sink = args["q"], args["kv"], args.get("value_dim", 512), args.get("sink")
    sizes = (rank, q.shape[-1] - rank, kv.shape[-1])
    loose = [n for n in ("q", "kv") if args[n].stride(-1) != 1 or (args[n].stride(-2) | args[n].stride(0)) % 8]
    return support(
        unknown(args, ("q", "kv", "indices", "scale", "value_dim", "sink")),
        dtypes(args, ("q", "kv"), HALVES),
        dtypes(args, ("indices",), ("int32",)),
        dtypes(args, ("sink",), ("float32",)),
        same_dtype(args, ("q", "kv")),
        one_device(args),
        f"latents of {rank} with {sizes[1]} rotated channels; takes 512 with 64" if sizes != (512, 64, 576) else "",
        f"{q.shape[1]} heads; takes multiples of 64" if q.shape[1] % HEADS else "",
        "no choices" if not indices_wide(args) else "",
        "an empty cache" if not kv.shape[0] else "",
        f"{' and '.join(loose)} off the 16-byte grid" if loose or (q.data_ptr() | kv.data_ptr()) % 16 else "",
        "sinks with gaps" if sink is not None and not sink.is_contiguous() else "",
    )


def indices_wide(args: Mapping[str, Any]) -> int:
    """The number of choices of a query."""
    return args["indices"].shape[1]


KERNEL = Kernel(
    op="sparse_mla",
    technique="wgmma",
    summary="warps that gather beside warps that multiply; for Hopper's asynchronous matrix units",
    run=run,
    requires=Requires(device=("cuda",), arch=(90, 90), dtypes=HALVES, phases=("prefill",)),
    supports=supports,
    interpreter="Gluon programs address the chip's own units",
)
