"""Latent attention over paged caches: the rows of a sequence are split between programs, their parts combined.

How many parts there are follows from shapes alone (no length is read back), how long they are from the length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.parts import HALVES, LOG2E, combine
from dz.kernels.common.refuse import support
from dz.kernels.common.tuned import Tunable, processors
from dz.kernels.mla_decode._support import supports as shared
from dz.ops.latent_fp8 import GROUP, width

TUNE = Tunable(
    "mla_decode/split",
    {"heads": 16, "keys": 32, "warps": 4, "stages": 3, "fill": 2},
    {
        "default": [
            {"heads": h, "keys": k, "warps": w, "stages": s, "fill": f}
            for h, k, w, s, f in ((16, 32, 4, 4, 1), (16, 32, 4, 3, 2), (16, 64, 8, 2, 1), (16, 64, 4, 2, 1))
        ]
    },
)


@triton.jit
def _part(
    q, cache, table, lengths, logs, partial, heads, scale, q_row, q_head, c_row, t_row,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mine = (head < heads)[:, None]
    c = tl.arange(0, RANK)[None, :]
    r = tl.arange(0, ROPE)[None, :]
    line = q + sequence * q_row + head[:, None] * q_head
    q_latent = tl.load(line + c, mask=mine, other=0.0)
    q_rope = tl.load(line + RANK + r, mask=mine, other=0.0)
    acc = tl.zeros([HEADS, RANK], tl.float32)
    best = tl.full([HEADS], -1e38, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    length = tl.load(lengths + sequence)
    each = tl.cdiv(tl.cdiv(length, KEYS), tl.num_programs(2)) * KEYS
    first = tl.program_id(2) * each
    last = tl.minimum(first + each, length)
    blocks = table + sequence * t_row
    k = tl.arange(0, KEYS)
    coming = tl.load(blocks + (first + k) // PAGE, mask=first + k < last, other=0)  # a tile ahead of its use
    for start in range(first, last, KEYS):
        at = start + k
        # Block and offset apart: their sum would be taken for a multiple of 16, as both seem to be.
        row = cache + coming.to(tl.int64)[:, None] * (PAGE * c_row) + (at % PAGE)[:, None] * c_row
        coming = tl.load(blocks + (at + KEYS) // PAGE, mask=at + KEYS < last, other=0)
        real = (at < last)[:, None]
        if PACKED:
            codes = tl.load(row + c, mask=real, other=0).to(tl.float8e4nv, bitcast=True)
            at_scale = (row + RANK).to(tl.pointer_type(tl.float32)) + tl.arange(0, SCALES)[None, :]
            scales = tl.load(at_scale, mask=real, other=0.0)
            tail = (row + RANK + SCALES * 4).to(tl.pointer_type(tl.bfloat16)) + r
            rope = tl.load(tail, mask=real, other=0.0).to(q_rope.dtype)
            wide = tl.reshape(codes.to(tl.float16).to(tl.float32), [KEYS, SCALES, RANK // SCALES])
            latent = tl.reshape(wide * scales[:, :, None], [KEYS, RANK]).to(q_latent.dtype)
        else:
            latent = tl.load(row + c, mask=real, other=0.0)
            rope = tl.load(row + RANK + r, mask=real, other=0.0)
        s = tl.dot(q_rope, tl.trans(rope))
        s = tl.dot(q_latent, tl.trans(latent), s) * scale
        s = tl.where((at < last)[None, :], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        keep = tl.exp2(best - top)
        p = tl.exp2(s - top[:, None])
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * keep[:, None])
        best = top
    some = total > 0
    place = (sequence * tl.num_programs(2) + tl.program_id(2)) * heads + head
    tl.store(logs + place, tl.where(some, best + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=head < heads)
    if first < last:
        tl.store(partial + place[:, None] * RANK + c, acc / tl.where(some, total, 1.0)[:, None], mask=mine)


def run(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    value_dim: int = 512,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See dz.ops.mla_decode.reference."""
    (sequences, heads, dim), page, packed = q.shape, cache.shape[1], cache.dtype == torch.uint8
    out = torch.empty(sequences, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(sequences, heads, dtype=torch.float32, device=q.device)
    if not sequences:
        return out, lse
    cfg = TUNE.pick(q.device)
    tile = min(cfg["heads"], power_of_two(heads, 16))
    groups, tiles = triton.cdiv(heads, tile), triton.cdiv(block_table.shape[1] * page, cfg["keys"])
    splits = max(1, min(tiles, processors(q.device) * cfg["fill"] // (sequences * groups)))
    partial = torch.empty(sequences, splits, heads, value_dim, dtype=torch.float32, device=q.device)
    logs = torch.empty(sequences, splits, heads, dtype=torch.float32, device=q.device)
    with on(q):
        _part[(sequences, groups, splits)](
            q, cache, block_table, lengths, logs, partial, heads, scale * LOG2E,
            q.stride(0), q.stride(1), cache.stride(1), block_table.stride(0),
            RANK=value_dim, ROPE=dim - value_dim, HEADS=tile, KEYS=cfg["keys"], PAGE=page, PACKED=packed,
            SCALES=value_dim // GROUP if packed else 1, num_warps=cfg["warps"], num_stages=cfg["stages"],
        )  # fmt: skip
        combine(partial, logs, sink, out, lse)
    return out, lse


def supports(args: Mapping[str, Any]) -> Support:
    """Latents of a power of two from 16 to 512 (packed: from 128), rotated parts of one from 16 to 128."""
    q, cache, rank = args["q"], args["cache"], args.get("value_dim", 512)
    packed, rope = cache.dtype == torch.uint8, q.shape[-1] - rank
    low = GROUP if packed else 16
    fits = width(rank, rope) if packed else q.shape[-1]
    return support(
        shared(args).reason,
        f"a latent of {rank}; takes powers of two from {low} to 512" if rank & (rank - 1) or rank < low else "",
        f"{rope} rotated channels; takes powers of two from 16" if not 16 <= rope <= 128 or rope & (rope - 1) else "",
        f"rows of {cache.shape[2]}, not {fits}" if cache.shape[2] != fits else "",
        "packed rows off the four-byte grid" if packed and (cache.stride(1) | cache.data_ptr()) % 4 else "",
    )


KERNEL = Kernel(
    op="mla_decode",
    technique="split",
    summary="pages split between programs and combined",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(89, None), dtypes=HALVES, phases=("decode",)),
    supports=supports,
)
