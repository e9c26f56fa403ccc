"""Latent attention over chosen rows: a program takes one query and up to 64 heads, and gathers its rows tile by tile.

A gathered tile is the keys of one product and, its first columns, the values of the other, so that each row is read
once. Programs of one query stand beside each other: the second reads what the first brought into the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.parts import HALVES, LOG2E, finish
from dz.kernels.common.refuse import dtypes, one_device, same_dtype, support, unknown
from dz.kernels.common.tuned import Tunable

TUNE = Tunable(
    "sparse_mla/triton",
    {"heads": 64, "keys": 64, "warps": 8, "stages": 2},
    {
        "default": [
            {"heads": h, "keys": k, "warps": w, "stages": s}
            for h, k, w, s in ((64, 64, 8, 2), (64, 32, 8, 3), (64, 32, 8, 4), (64, 64, 8, 1), (32, 32, 4, 3))
        ]
    },
)


@triton.jit
def _attend(
    q, kv, indices, sink, out, lse, n_rows, heads, picks, scale, q_row, q_head, kv_row, i_row, groups,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    query = (tl.program_id(0) // groups).to(tl.int64)
    head = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    mine = (head < heads)[:, None]
    c = tl.arange(0, RANK)[None, :]
    r = RANK + tl.arange(0, ROPE)[None, :]
    line = q + query * q_row + head[:, None] * q_head
    q_latent = tl.load(line + c, mask=mine, other=0.0)
    q_rope = tl.load(line + r, mask=mine, other=0.0)
    acc = tl.zeros([HEADS, RANK], tl.float32)
    best = tl.full([HEADS], -1e38, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    chosen = indices + query * i_row
    k = tl.arange(0, KEYS)
    coming = tl.load(chosen + k, mask=k < picks, other=-1)  # one tile ahead: the gather must not wait for it
    for start in range(0, picks, KEYS):
        index = coming
        coming = tl.load(chosen + start + KEYS + k, mask=start + KEYS + k < picks, other=-1)
        real = (index >= 0) & (index < n_rows)
        row = kv + tl.where(real, index, 0).to(tl.int64)[:, None] * kv_row
        latent = tl.load(row + c, mask=real[:, None], other=0.0)
        rope = tl.load(row + r, mask=real[:, None], other=0.0)
        s = tl.dot(q_rope, tl.trans(rope))
        s = tl.dot(q_latent, tl.trans(latent), s) * scale
        s = tl.where(real[None, :], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        keep = tl.exp2(best - top)
        p = tl.exp2(s - top[:, None])
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * keep[:, None])
        best = top
    finish(acc, best, total, query * heads + head, head, heads, sink, out, lse, RANK, SINK)


def run(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, value_dim: int = 512, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See dz.ops.sparse_mla.reference."""
    (queries, heads, dim), cfg = q.shape, TUNE.pick(q.device)
    out = torch.empty(queries, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    q, kv, indices = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, kv, indices))
    tile = min(cfg["heads"], power_of_two(heads, 16))
    groups = triton.cdiv(heads, tile)
    if queries:
        with on(q):
            _attend[(queries * groups,)](
                q, kv, indices, lse if sink is None else sink, out, lse, kv.shape[0], heads, indices.shape[1],
                scale * LOG2E, q.stride(0), q.stride(1), kv.stride(0), indices.stride(0), groups,
                RANK=value_dim, ROPE=dim - value_dim, HEADS=tile, KEYS=cfg["keys"], SINK=sink is not None,
                num_warps=cfg["warps"] if tile == cfg["heads"] else 4, num_stages=cfg["stages"],
            )  # fmt: skip
    return out, lse


def supports(args: Mapping[str, Any]) -> Support:
    """Caches in q's dtype; latents of a power of two from 16 to 512, rotated parts of a power of two from 16 to 128."""
    q, kv, rank, sink = args["q"], args["kv"], args.get("value_dim", 512), args.get("sink")
    rope = q.shape[-1] - rank
    return support(
        unknown(args, ("q", "kv", "indices", "scale", "value_dim", "sink")),
        dtypes(args, ("q", "kv"), HALVES),
        dtypes(args, ("indices",), ("int32",)),
        dtypes(args, ("sink",), ("float32",)),
        same_dtype(args, ("q", "kv")),
        one_device(args),
        f"a latent of {rank}; takes powers of two from 16 to 512" if not 16 <= rank <= 512 or rank & (rank - 1) else "",
        f"{rope} rotated channels; takes powers of two from 16" if not 16 <= rope <= 128 or rope & (rope - 1) else "",
        f"rows of {kv.shape[1]} for queries of {q.shape[-1]}" if kv.shape[1] != q.shape[-1] else "",
        "an empty cache" if not kv.shape[0] else "",
        "sinks with gaps" if sink is not None and not sink.is_contiguous() else "",
    )


KERNEL = Kernel(
    op="sparse_mla",
    technique="triton",
    summary="one query and 64 heads a program, rows gathered once for keys and values",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=HALVES, phases=("prefill",)),
    supports=supports,
)
