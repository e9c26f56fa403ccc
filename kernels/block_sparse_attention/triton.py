"""Block-sparse attention with the loops turned round: each block of keys meets all queries that chose it.

Queries that share no blocks leave nothing to reuse when a program owns a query: every block would be read again for 16
rows of matrix work. Here (1) each query's blocks are counted and ranked, (2) the lists are turned round into work items
(a block and a stretch of its queries), (3) an item keeps its keys and values on chip and writes, for each of its
queries, a normalised partial result and its log-sum-exp, and (4) the partial results of a query are combined.
Partial results are kept in the dtype of q: `T * Hk * n` of them, [H / Hk, D] each; queries are taken in chunks to bound
them. The order within a list is not fixed, but no result depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, same_dtype, support, unknown
from dz.kernels.common.tuned import Tunable

TUNE = Tunable(
    "block_sparse_attention/triton",
    {"rows": 128, "warps": 8, "stages": 2, "item": 64, "chunk": 8192, "merge_warps": 4},
    {
        "default": [
            {"rows": r, "warps": w, "stages": s, "item": i, "chunk": c, "merge_warps": m}
            for r, w, s, i, c, m in (
                (128, 8, 2, 64, 8192, 4),
                (128, 8, 3, 64, 8192, 2),
                (64, 4, 2, 64, 8192, 1),
                (64, 4, 3, 64, 8192, 8),
                (128, 4, 2, 64, 8192, 4),
                (128, 8, 2, 128, 8192, 2),
                (128, 8, 3, 256, 8192, 2),
                (64, 4, 3, 128, 4096, 4),
            )
        ]
    },
)
LOG2E = 1.4426950408889634


@triton.jit
def _rank(
    blocks, positions, counts, ranks, n_rows, n_blocks, kv_heads, n,
    N: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """ranks [rows, n]: the place of this query in its block's list, -1 if it is not in one; counts by block."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, N)[None, :]
    inside = (r < n_rows)[:, None] & (j < n)
    at = r.to(tl.int64)[:, None] * n + j
    b = tl.load(blocks + at, mask=inside, other=-1)
    position = tl.load(positions + r // kv_heads, mask=r < n_rows, other=-1)[:, None]
    valid = inside & (b >= 0) & (b < n_blocks) & (b * SIZE <= position)
    for i in range(n):
        earlier = tl.load(blocks + r.to(tl.int64) * n + i, mask=r < n_rows, other=-1)[:, None]
        valid = valid & ((earlier != b) | (i >= j))
    rank = tl.atomic_add(counts + (r % kv_heads)[:, None] * n_blocks + b, 1, mask=valid)
    tl.store(ranks + at, tl.where(valid, rank, -1), mask=inside)


@triton.jit
def _turn(
    blocks, ranks, ends, counts, lists, n_rows, n_blocks, kv_heads, n,
    N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """lists: for each block, the entries (row * n + j) that chose it."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, N)[None, :]
    at = r[:, None] * n + j
    rank = tl.load(ranks + at, mask=(r < n_rows)[:, None] & (j < n), other=-1)
    listed = rank >= 0
    bin = (r % kv_heads)[:, None] * n_blocks + tl.load(blocks + at, mask=listed, other=0)
    start = tl.load(ends + bin, mask=listed, other=0) - tl.load(counts + bin, mask=listed, other=0)
    tl.store(lists + start + rank, at, mask=listed)


@triton.jit
def _itemise(counts, item_ends, items, n_bins, ITEM: tl.constexpr, WIDE: tl.constexpr):
    """items [number, 2]: the bin, and the first of its entries; unused items keep bin -1."""
    bin = tl.program_id(0)
    number = tl.cdiv(tl.load(counts + bin), ITEM)
    first = tl.load(item_ends + bin) - number
    for base in range(0, number, WIDE):
        i = base + tl.arange(0, WIDE)
        tl.store(items + (first + i) * 2, bin, mask=i < number)
        tl.store(items + (first + i) * 2 + 1, i * ITEM, mask=i < number)


@triton.jit
def _attend(
    q, k, v, positions, items, counts, ends, lists, partial, lse, n_keys, n_blocks, kv_heads, n, scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    GROUP: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, ITEM: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    bin = tl.load(items + tl.program_id(0) * 2)
    if bin >= 0:
        begin = tl.load(items + tl.program_id(0) * 2 + 1)
        count = tl.load(counts + bin)
        entries = lists + tl.load(ends + bin) - count
        head = bin // n_blocks
        block = bin % n_blocks
        d = tl.arange(0, D)
        key = block * SIZE + tl.arange(0, SIZE)
        real = (key < n_keys)[:, None]
        keys = tl.load(k + key.to(tl.int64)[:, None] * k_row + head * k_head + d[None, :], mask=real, other=0.0)
        values = tl.load(v + key.to(tl.int64)[:, None] * v_row + head * v_head + d[None, :], mask=real, other=0.0)
        keys = tl.trans(keys)
        r = tl.arange(0, ROWS)
        for at in range(begin, tl.minimum(begin + ITEM, count), ROWS // GROUP):
            here = at + r // GROUP
            mine = here < count
            entry = tl.load(entries + here, mask=mine, other=0)
            query = entry // (kv_heads * n)
            h = r % GROUP
            rows = tl.load(
                q + query.to(tl.int64)[:, None] * q_row + (head * GROUP + h)[:, None] * q_head + d[None, :],
                mask=mine[:, None], other=0.0,
            )  # fmt: skip
            position = tl.minimum(tl.load(positions + query, mask=mine, other=0), n_keys - 1)
            if PRECISE:
                s = tl.dot(rows, keys, input_precision="ieee") * scale
            else:
                s = tl.dot(rows, keys) * scale
            s = tl.where(key[None, :] <= position[:, None], s, float("-inf"))
            best = tl.maximum(tl.max(s, 1), -1e38)  # rows past the end of the list see nothing
            p = tl.exp2(s - best[:, None])
            total = tl.sum(p, 1)
            if PRECISE:
                o = tl.dot(p.to(values.dtype), values, input_precision="ieee")
            else:
                o = tl.dot(p.to(values.dtype), values)
            o = o / total[:, None]
            place = entry.to(tl.int64) * GROUP + h
            tl.store(partial + place[:, None] * D + d[None, :], o.to(partial.dtype.element_ty), mask=mine[:, None])
            tl.store(lse + place, best + tl.log2(total), mask=mine)


@triton.jit
def _merge(
    partial, lse, ranks, out, kv_heads, n,
    N: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One query and key head: the weighted sum of its partial results, in the order of its blocks."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, N)
    h = tl.arange(0, GROUP)
    d = tl.arange(0, D)
    used = (tl.load(ranks + row * n + j, mask=j < n, other=-1) >= 0)[:, None]
    parts = tl.load(lse + (row * n + j)[:, None] * GROUP + h[None, :], mask=used, other=float("-inf"))
    best = tl.max(parts, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp2(parts - best[None, :]), 0)
    total = tl.where(total == 0.0, 1.0, total)
    mix = tl.zeros([GROUP, D], tl.float32)
    for i in range(n):
        part = (row * n + i) * GROUP + h
        listed = tl.load(ranks + row * n + i + h * 0) >= 0
        weight = tl.exp2(tl.load(lse + part, mask=listed, other=float("-inf")) - best) / total
        x = tl.load(partial + part[:, None] * D + d[None, :], mask=listed[:, None], other=0.0)
        mix += x.to(tl.float32) * weight[:, None]
    at = (row * GROUP + h)[:, None] * D + d[None, :]
    tl.store(out + at, mix.to(out.dtype.element_ty))


def run(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, positions: Tensor, *, scale: float, block_size: int = 128
) -> Tensor:
    """See dz.ops.block_sparse_attention.reference."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel():
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        chunk = TUNE.pick(q.device)["chunk"]
        with on(q):
            for i in range(0, q.shape[0], chunk):
                part = slice(i, i + chunk)
                _chunk(q[part], k, v, blocks[part], positions[part], out[part], scale * LOG2E, block_size)
    return out


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, positions: Tensor, out: Tensor, scale: float, size: int
) -> None:
    cfg = TUNE.pick(q.device)
    (queries, heads, dim), (keys, kv_heads, _), n = q.shape, k.shape, blocks.shape[-1]
    group, count, n_rows = heads // kv_heads, triton.cdiv(keys, size), queries * kv_heads
    rows = max(16, group, min(cfg["rows"], power_of_two(queries * group)))
    item = max(cfg["item"], rows // group)
    bins, most = kv_heads * count, triton.cdiv(n_rows * n, item) + kv_heads * count
    meta = {"dtype": torch.int32, "device": q.device}
    counts, ranks, lists = torch.zeros(bins, **meta), torch.empty(n_rows, n, **meta), torch.empty(n_rows * n, **meta)
    partial = torch.empty(n_rows * n, group, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(n_rows * n, group, dtype=torch.float32, device=q.device)
    wide, tile = power_of_two(n), 32
    grid = (triton.cdiv(n_rows, tile),)
    _rank[grid](blocks, positions, counts, ranks, n_rows, count, kv_heads, n, N=wide, ROWS=tile, SIZE=size, num_warps=4)
    ends = torch.cumsum(torch.stack((counts, (counts + item - 1) // item)), 1, dtype=torch.int32)
    items = torch.full((most, 2), -1, **meta)
    _turn[grid](blocks, ranks, ends[0], counts, lists, n_rows, count, kv_heads, n, N=wide, ROWS=tile, num_warps=4)
    _itemise[(bins,)](counts, ends[1], items, bins, ITEM=item, WIDE=32, num_warps=1)
    _attend[(most,)](
        q, k, v, positions, items, counts, ends[0], lists, partial, lse, keys, count, kv_heads, n, scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        GROUP=group, D=dim, SIZE=size, ROWS=rows, ITEM=item, PRECISE=q.dtype == torch.float32,
        num_warps=cfg["warps"], num_stages=cfg["stages"],
    )  # fmt: skip
    _merge[(n_rows,)](partial, lse, ranks, out, kv_heads, n, N=wide, GROUP=group, D=dim, num_warps=cfg["merge_warps"])


def supports(args: Mapping[str, Any]) -> Support:
    """Head sizes, block sizes and groups of heads that are powers of two; whole groups; contiguous tables."""
    q, k, blocks, size = args["q"], args["k"], args["blocks"], args.get("block_size", 128)
    dim, group = q.shape[-1], q.shape[1] // max(k.shape[1], 1)
    tables = [name for name in ("blocks", "positions") if not args[name].is_contiguous()]
    return support(
        unknown(args, ("q", "k", "v", "blocks", "positions", "scale", "block_size")),
        dtypes(args, ("q", "k", "v"), FLOATS),
        dtypes(args, ("blocks", "positions"), ("int32",)),
        same_dtype(args, ("q", "k", "v")),
        one_device(args),
        f"head size {dim}; takes powers of two from 16 to 256" if not 16 <= dim <= 256 or dim & (dim - 1) else "",
        f"blocks of {size}; takes powers of two from 16 to 128" if not 16 <= size <= 128 or size & (size - 1) else "",
        f"{q.shape[1]} heads on {k.shape[1]} key heads" if q.shape[1] % k.shape[1] else "",
        f"groups of {group} heads; takes powers of two up to 128" if group > 128 or group & (group - 1) else "",
        f"{' and '.join(tables)} with gaps" if tables else "",
        "no blocks" if not blocks.shape[-1] or not k.shape[0] else "",
        "more than 2^31 entries" if blocks.numel() * group >= 2**31 else "",
    )


KERNEL = Kernel(
    op="block_sparse_attention",
    technique="triton",
    summary="each block of keys meets the queries that chose it; partial results combined",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=FLOATS, phases=("prefill",)),
    supports=supports,
)
