"""Latent attention over chosen rows for few queries: the rows are split between programs, their parts combined.

Rows may be packed (dz.ops.latent_fp8): codes become q's dtype in registers, scaled in fp32, once for both products.
The number of splits follows from the shapes and the device's multiprocessors, so equal calls give equal bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.parts import HALVES, LOG2E, combine, finish
from dz.kernels.common.refuse import dtypes, one_device, same_dtype, support, unknown
from dz.kernels.common.tuned import Tunable, processors
from dz.ops.latent_fp8 import GROUP, width

TUNE = Tunable(
    "sparse_mla/split",
    {"heads": 64, "keys": 64, "warps": 8, "stages": 2, "fill": 1},
    {
        bucket: [
            {"heads": h, "keys": k, "warps": w, "stages": s, "fill": f}
            for h, k, w, s, f in (
                (64, 64, 8, 2, 1),
                (64, 64, 8, 1, 1),
                (64, 32, 8, 2, 1),
                (64, 32, 8, 3, 1),
                (64, 64, 8, 2, 2),
                (32, 64, 8, 2, 1),
                (32, 32, 4, 2, 2),
                (16, 32, 4, 3, 1),
                (16, 64, 4, 2, 2),
            )
        ]
        for bucket in ("one", "some", "many")
    },
)


@triton.jit
def _part(
    q, kv, indices, sink, out, lse, partial, n_rows, heads, picks, scale, q_row, q_head, kv_row, i_row,
    each,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SINK: tl.constexpr,
    PACKED: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One query, up to HEADS heads, `each` of its choices. WHOLE: they are all, and the result is final."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mine = (head < heads)[:, None]
    c = tl.arange(0, RANK)[None, :]
    line = q + query * q_row + head[:, None] * q_head
    q_latent = tl.load(line + c, mask=mine, other=0.0)
    q_rope = tl.load(line + RANK + tl.arange(0, ROPE)[None, :], mask=mine, other=0.0)
    acc = tl.zeros([HEADS, RANK], tl.float32)
    best = tl.full([HEADS], -1e38, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    chosen = indices + query * i_row
    k = tl.arange(0, KEYS)
    first = tl.program_id(2) * each
    end = tl.minimum(first + each, picks)
    coming = tl.load(chosen + first + k, mask=first + k < end, other=-1)
    for start in range(first, end, KEYS):
        index = coming
        coming = tl.load(chosen + start + KEYS + k, mask=start + KEYS + k < end, other=-1)
        real = (index >= 0) & (index < n_rows)
        row = kv + tl.where(real, index, 0).to(tl.int64)[:, None] * kv_row
        if PACKED:
            codes = tl.load(row + c, mask=real[:, None], other=0).to(tl.float8e4nv, bitcast=True)
            at = (row + RANK).to(tl.pointer_type(tl.float32)) + tl.arange(0, SCALES)[None, :]
            scales = tl.load(at, mask=real[:, None], other=0.0)
            tail = (row + RANK + SCALES * 4).to(tl.pointer_type(tl.bfloat16)) + tl.arange(0, ROPE)[None, :]
            rope = tl.load(tail, mask=real[:, None], other=0.0).to(q_rope.dtype)
            wide = tl.reshape(codes.to(tl.float16).to(tl.float32), [KEYS, SCALES, RANK // SCALES])
            latent = tl.reshape(wide * scales[:, :, None], [KEYS, RANK]).to(q_latent.dtype)
        else:
            latent = tl.load(row + c, mask=real[:, None], other=0.0)
            rope = tl.load(row + RANK + tl.arange(0, ROPE)[None, :], mask=real[:, None], other=0.0)
        s = tl.dot(q_rope, tl.trans(rope))
        s = tl.dot(q_latent, tl.trans(latent), s) * scale
        s = tl.where(real[None, :], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        keep = tl.exp2(best - top)
        p = tl.exp2(s - top[:, None])
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * keep[:, None])
        best = top
    if WHOLE:
        finish(acc, best, total, query * heads + head, head, heads, sink, out, lse, RANK, SINK)
    else:
        some = total > 0
        place = (query * tl.num_programs(2) + tl.program_id(2)) * heads + head
        acc = acc / tl.where(some, total, 1.0)[:, None]
        tl.store(partial + place[:, None] * RANK + c, acc, mask=mine)
        logs = tl.where(some, best + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse + place, logs, mask=head < heads)


def run(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, value_dim: int = 512, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See dz.ops.sparse_mla.reference."""
    (queries, heads, dim), picks, packed = q.shape, indices.shape[1], kv.dtype == torch.uint8
    out = torch.empty(queries, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    if not queries:
        return out, lse
    cfg = TUNE.pick(q.device, "one" if queries == 1 else "some" if queries <= 32 else "many")
    q, kv, indices = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, kv, indices))
    tile = min(cfg["heads"], power_of_two(heads, 16))
    groups, tiles = triton.cdiv(heads, tile), max(1, triton.cdiv(picks, cfg["keys"]))
    wanted = max(1, processors(q.device) * cfg["fill"] // (queries * groups))
    each = triton.cdiv(tiles, min(wanted, tiles)) * cfg["keys"]
    splits = max(1, triton.cdiv(picks, each))
    whole = splits == 1
    partial = out if whole else torch.empty(queries, splits, heads, value_dim, dtype=torch.float32, device=q.device)
    logs = lse if whole else torch.empty(queries, splits, heads, dtype=torch.float32, device=q.device)
    with on(q):
        _part[(queries, groups, splits)](
            q, kv, indices, lse if sink is None else sink, out, logs, partial, kv.shape[0], heads, picks,
            scale * LOG2E, q.stride(0), q.stride(1), kv.stride(0), indices.stride(0), each,
            RANK=value_dim, ROPE=dim - value_dim, HEADS=tile, KEYS=cfg["keys"], SINK=sink is not None,
            PACKED=packed, SCALES=value_dim // GROUP if packed else 1, WHOLE=whole,
            num_warps=cfg["warps"] if tile > 16 else 4, num_stages=cfg["stages"],
        )  # fmt: skip
        if not whole:
            combine(partial, logs, sink, out, lse)
    return out, lse


def supports(args: Mapping[str, Any]) -> Support:
    """Caches in q's dtype or packed; latents of a power of two from 16 to 512 (packed: from 128)."""
    q, kv, rank, sink = args["q"], args["kv"], args.get("value_dim", 512), args.get("sink")
    packed, rope = kv.dtype == torch.uint8, q.shape[-1] - rank
    low = GROUP if packed else 16
    bad = rank & (rank - 1) or not low <= rank <= 512
    fits = width(rank, rope) if packed else q.shape[-1]
    return support(
        unknown(args, ("q", "kv", "indices", "scale", "value_dim", "sink")),
        dtypes(args, ("q",), HALVES),
        dtypes(args, ("kv",), (*HALVES, "uint8")),
        dtypes(args, ("indices",), ("int32",)),
        dtypes(args, ("sink",), ("float32",)),
        "" if packed else same_dtype(args, ("q", "kv")),
        one_device(args),
        f"a latent of {rank}; takes powers of two from {low} to 512" if bad else "",
        f"{rope} rotated channels; takes powers of two from 16" if not 16 <= rope <= 128 or rope & (rope - 1) else "",
        f"rows of {kv.shape[1]}, not {fits}" if kv.shape[1] != fits else "",
        "an empty cache" if not kv.shape[0] else "",
        "packed rows off the four-byte grid" if packed and (kv.stride(0) | kv.data_ptr()) % 4 else "",
        "sinks with gaps" if sink is not None and not sink.is_contiguous() else "",
    )


KERNEL = Kernel(
    op="sparse_mla",
    technique="split",
    summary="rows split between programs and combined; packed rows become q's dtype in registers",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(89, None), dtypes=HALVES, phases=("decode",)),
    supports=supports,
)
