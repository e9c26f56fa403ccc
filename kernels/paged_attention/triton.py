"""Paged attention for many queries: a program takes a tile of one sequence's queries under one head.

Tiles are found in the kernel from cu_q, so that a ragged batch needs no host plan: sequence b starts at tile
cu_q[b] // ROWS + b, and tiles past a sequence's end leave at once. Late tiles, which see most keys, start first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.parts import HALVES, LOG2E
from dz.kernels.common.tuned import Tunable
from dz.kernels.paged_attention._support import supports

TUNE = Tunable(
    "paged_attention/triton",
    {"rows": 64, "keys": 64, "warps": 4, "stages": 3},
    {
        "default": [
            {"rows": r, "keys": k, "warps": w, "stages": s}
            for r, k, w, s in (
                (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3),
            )
        ]
    },
)  # fmt: skip


@triton.jit
def _kernel(
    q, k_cache, v_cache, table, lengths, cu_q, sinks, out, n_sequences, heads, scale, window, softcap,
    q_row, q_head, k_block, k_row, k_head, v_block, v_row, v_head, t_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    BATCH: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    n = tl.arange(0, BATCH)
    starts = tl.load(cu_q + n, mask=n < n_sequences, other=0) // ROWS + n
    sequence = tl.sum(((starts <= tile) & (n < n_sequences)).to(tl.int32), 0) - 1
    begin = tl.load(cu_q + sequence)
    count = tl.load(cu_q + sequence + 1) - begin
    row = (tile - begin // ROWS - sequence) * ROWS
    if row < count:
        length = tl.load(lengths + sequence)
        r = row + tl.arange(0, ROWS)
        k = tl.arange(0, KEYS)
        d = tl.arange(0, D)[None, :]
        mine = (r < count)[:, None]
        line = (begin + r).to(tl.int64)[:, None] * q_row + head * q_head
        queries = tl.load(q + line + d, mask=mine, other=0.0)
        position = length - count + r
        high = tl.minimum(length - count + row + ROWS, length)
        free = (length - count + row) // KEYS * KEYS  # tiles before it are seen by every query
        low = 0
        if WINDOW:
            low = tl.maximum(length - count + row - window + 1, 0) // KEYS * KEYS
        acc = tl.zeros([ROWS, D], tl.float32)
        best = tl.full([ROWS], -1e38, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        blocks = table + tl.cast(sequence, tl.int64) * t_row
        group = head // GROUP
        coming = tl.load(blocks + (low + k) // PAGE, mask=low + k < high, other=0)
        for start in range(low, high, KEYS):
            at = start + k
            block = coming.to(tl.int64)[:, None]
            coming = tl.load(blocks + (at + KEYS) // PAGE, mask=at + KEYS < high, other=0)
            real = (at < high)[:, None]
            offset = (at % PAGE)[:, None]
            keys = tl.load(k_cache + block * k_block + offset * k_row + group * k_head + d, mask=real, other=0.0)
            values = tl.load(v_cache + block * v_block + offset * v_row + group * v_head + d, mask=real, other=0.0)
            s = tl.dot(queries, tl.trans(keys)) * scale
            if SOFTCAP:
                s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.885390081777927 / softcap)) + 1.0)) * 1.4426950408889634
            if WINDOW:
                near = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window)
                s = tl.where(near, s, float("-inf"))
            elif start >= free:
                s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
            top = tl.maximum(best, tl.max(s, 1))
            keep = tl.exp2(best - top)
            p = tl.exp2(s - top[:, None])
            total = total * keep + tl.sum(p, 1)
            acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None])
            best = top
        if SINKS:
            extra = tl.load(sinks + head) * 1.4426950408889634
            rise = tl.maximum(best, extra)
            acc = acc * tl.exp2(best - rise)[:, None]
            total = total * tl.exp2(best - rise) + tl.exp2(extra - rise)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = (begin + r).to(tl.int64)[:, None] * heads + head
        tl.store(out + place * D + d, acc.to(out.dtype.element_ty), mask=mine)


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
    rows = min(cfg["rows"], power_of_two(tokens, 16))
    with on(q):
        _kernel[(triton.cdiv(tokens, rows) + batch, heads)](
            q, k_cache, v_cache, block_table, kv_lengths, cu_q, q if sinks is None else sinks, out,
            batch, heads, scale if softcap else scale * LOG2E, window or 0, softcap or 0.0, q.stride(0), q.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
            GROUP=heads // groups, ROWS=rows, D=dim, KEYS=cfg["keys"] if dim <= 128 else 32, PAGE=page,
            BATCH=power_of_two(batch), WINDOW=window is not None, SINKS=sinks is not None,
            SOFTCAP=softcap is not None, num_warps=cfg["warps"] if dim <= 128 else 8,
            num_stages=cfg["stages"],
        )  # fmt: skip
    return out


KERNEL = Kernel(
    op="paged_attention",
    technique="triton",
    summary="a tile of queries under one head, online softmax over gathered pages",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=HALVES, phases=("prefill",)),
    supports=supports,
)
