"""Paged attention for few queries a sequence: the keys are split between programs, the parts combined.

A program takes one query, the heads of one key head and a stretch of positions. How many stretches there are follows
from shapes alone (no length is read back), how long they are from the sequence's own length."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.parts import HALVES, LOG2E, combine
from dz.kernels.common.tuned import Tunable, processors
from dz.kernels.paged_attention._support import supports

TUNE = Tunable(
    "paged_attention/split",
    {"keys": 64, "warps": 4, "stages": 3, "fill": 8, "most": 64},
    {
        "default": [
            {"keys": k, "warps": w, "stages": s, "fill": f}
            for k, w, s, f in (
                (64, 4, 3, 8), (64, 4, 3, 16), (128, 4, 3, 8), (128, 4, 2, 16), (64, 2, 3, 16), (64, 4, 4, 8),
                (32, 2, 5, 16), (128, 8, 3, 8),
            )
        ]
    },
)  # fmt: skip


@triton.jit
def _part(
    q, k_cache, v_cache, table, lengths, cu_q, sinks, out, logs, partial, n_sequences, heads, scale, window, softcap,
    q_row, q_head, k_block, k_row, k_head, v_block, v_row, v_head, t_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    BATCH: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    group = tl.program_id(1)
    n = tl.arange(0, BATCH)
    ends = tl.load(cu_q + 1 + n, mask=n < n_sequences, other=2147483647)
    sequence = tl.sum((ends <= token).to(tl.int32), 0)
    length = tl.load(lengths + sequence)
    seen = length - tl.load(cu_q + sequence + 1) + token + 1  # keys up to the query's own position
    low = 0
    if WINDOW:
        low = tl.maximum(seen - window, 0)
    tiles = tl.cdiv(seen, KEYS) - low // KEYS
    each = tl.cdiv(tiles, tl.num_programs(2))
    first = (low // KEYS + tl.program_id(2) * each) * KEYS
    last = tl.minimum(first + each * KEYS, seen)
    d = tl.arange(0, D)[None, :]
    k = tl.arange(0, KEYS)
    r = tl.arange(0, ROWS)
    head = group * GROUP + r
    line = tl.cast(token, tl.int64) * q_row + head[:, None] * q_head
    rows = tl.load(q + line + d, mask=(r < GROUP)[:, None], other=0.0)
    acc = tl.zeros([ROWS, D], tl.float32)
    best = tl.full([ROWS], -1e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    blocks = table + tl.cast(sequence, tl.int64) * t_row
    coming = tl.load(blocks + (first + k) // PAGE, mask=first + k < last, other=0)  # a tile ahead of its use
    for start in range(first, last, KEYS):
        at = start + k
        block = coming.to(tl.int64)[:, None]
        coming = tl.load(blocks + (at + KEYS) // PAGE, mask=at + KEYS < last, other=0)
        real = (at < last) & (at >= low)
        offset = (at % PAGE)[:, None]
        keys = tl.load(k_cache + block * k_block + offset * k_row + group * k_head + d, mask=real[:, None], other=0.0)
        values = tl.load(v_cache + block * v_block + offset * v_row + group * v_head + d, mask=real[:, None], other=0.0)
        s = tl.dot(rows, tl.trans(keys)) * scale
        if SOFTCAP:
            s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.885390081777927 / softcap)) + 1.0)) * 1.4426950408889634
        s = tl.where(real[None, :], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        keep = tl.exp2(best - top)
        p = tl.exp2(s - top[:, None])
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None])
        best = top
    mine = r < GROUP
    if WHOLE:
        if SINKS:
            extra = tl.load(sinks + head, mask=mine, other=0.0) * 1.4426950408889634
            high = tl.maximum(best, extra)
            acc = acc * tl.exp2(best - high)[:, None]
            total = total * tl.exp2(best - high) + tl.exp2(extra - high)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = tl.cast(token, tl.int64) * heads + head
        tl.store(out + place[:, None] * D + d, acc.to(out.dtype.element_ty), mask=mine[:, None])
    else:
        some = total > 0
        place = (tl.cast(token, tl.int64) * tl.num_programs(2) + tl.program_id(2)) * heads + head
        tl.store(logs + place, tl.where(some, best + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=mine)
        if first < last:
            acc = acc / tl.where(some, total, 1.0)[:, None]
            tl.store(partial + place[:, None] * D + d, acc, mask=mine[:, None])


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
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    cfg, device = TUNE.pick(q.device), q.device
    longest = min(block_table.shape[1] * page, window or block_table.shape[1] * page)
    wanted = triton.cdiv(processors(device) * cfg["fill"], tokens * groups)
    splits = max(1, min(wanted, cfg["most"], triton.cdiv(longest, cfg["keys"])))
    partial = torch.empty(tokens, splits, heads, dim, dtype=torch.float32, device=device) if splits > 1 else out
    logs = torch.empty(tokens, splits, heads, dtype=torch.float32, device=device)
    cap: dict[str, Any] = {"scale": scale if softcap else scale * LOG2E, "softcap": softcap or 0.0}
    with on(q):
        _part[(tokens, groups, splits)](
            q, k_cache, v_cache, block_table, kv_lengths, cu_q, logs if sinks is None else sinks, out, logs, partial,
            block_table.shape[0], heads, cap["scale"], window or 0, cap["softcap"], q.stride(0), q.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
            GROUP=heads // groups, ROWS=power_of_two(heads // groups, 16), D=dim, KEYS=cfg["keys"], PAGE=page,
            BATCH=power_of_two(block_table.shape[0]), WINDOW=window is not None, SINKS=sinks is not None,
            SOFTCAP=softcap is not None, WHOLE=splits == 1, num_warps=cfg["warps"],
            num_stages=cfg["stages"] if dim <= 128 else 2,
        )  # fmt: skip
        if splits > 1:
            combine(partial, logs, sinks, out)
    return out


KERNEL = Kernel(
    op="paged_attention",
    technique="split",
    summary="positions split between programs and combined; for decode",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=HALVES, phases=("decode",)),
    supports=supports,
)
