"""Block-sparse attention for decode: the selected blocks are split between programs, their parts combined."""

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
from dz.kernels.common.refuse import dtypes, one_device, same_dtype, support, unknown
from dz.kernels.common.tuned import Tunable, processors

TUNE = Tunable(
    "block_sparse_decode/split",
    {"keys": 64, "warps": 4, "stages": 3, "fill": 8},
    {
        "default": [
            {"keys": k, "warps": w, "stages": s, "fill": f}
            for k, w, s, f in ((64, 4, 3, 8), (64, 4, 3, 4), (128, 4, 2, 8), (64, 4, 4, 16))
        ]
    },
)


@triton.jit
def _part(
    q, k_cache, v_cache, table, lengths, blocks, logs, partial, heads, n, each, scale,
    q_row, q_head, k_block, k_row, k_head, v_block, v_row, v_head, t_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One sequence, one key head, `each` of its blocks."""
    sequence = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    length = tl.load(lengths + sequence)
    named = blocks + (sequence * tl.num_programs(1) + group) * n
    j = tl.arange(0, N)
    all_blocks = tl.load(named + j, mask=j < n, other=-1)
    d = tl.arange(0, D)[None, :]
    k = tl.arange(0, KEYS)
    r = tl.arange(0, ROWS)
    head = group * GROUP + r
    mine = r < GROUP
    rows = tl.load(q + sequence * q_row + head[:, None] * q_head + d, mask=mine[:, None], other=0.0)
    acc = tl.zeros([ROWS, D], tl.float32)
    best = tl.full([ROWS], -1e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    pages = table + sequence * t_row
    first = tl.program_id(2) * each
    steps = (tl.minimum(first + each, n) - first) * (SIZE // KEYS)
    for step in range(steps):
        i = first + step // (SIZE // KEYS)
        block = tl.load(named + i)
        again = tl.sum(((all_blocks == block) & (j < i)).to(tl.int32), 0)
        start = tl.where((block < 0) | (again > 0), 2147483647 - SIZE, block * SIZE)  # far beyond any length
        at = start + step % (SIZE // KEYS) * KEYS + k
        real = at < length
        page = tl.load(pages + at // PAGE, mask=real, other=0).to(tl.int64)[:, None]
        offset = (at % PAGE)[:, None]
        keys = tl.load(k_cache + page * k_block + offset * k_row + group * k_head + d, mask=real[:, None], other=0.0)
        values = tl.load(v_cache + page * v_block + offset * v_row + group * v_head + d, mask=real[:, None], other=0.0)
        s = tl.where(real[None, :], tl.dot(rows, tl.trans(keys)) * scale, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        keep = tl.exp2(best - top)
        p = tl.exp2(s - top[:, None])
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None])
        best = top
    some = total > 0
    place = (sequence * tl.num_programs(2) + tl.program_id(2)) * heads + head
    tl.store(logs + place, tl.where(some, best + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=mine)
    tl.store(partial + place[:, None] * D + d, acc / tl.where(some, total, 1.0)[:, None], mask=mine[:, None])


def run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    blocks: Tensor,
    *,
    scale: float,
    block_size: int = 128,
) -> Tensor:
    """See dz.ops.block_sparse_decode.reference."""
    (sequences, heads, dim), (_, page, groups, _), n = q.shape, k_cache.shape, blocks.shape[2]
    out = torch.empty(sequences, heads, dim, dtype=q.dtype, device=q.device)
    if not sequences:
        return out
    cfg = TUNE.pick(q.device)
    wanted = max(1, min(n, processors(q.device) * cfg["fill"] // (sequences * groups)))
    each = triton.cdiv(n, wanted)
    splits = triton.cdiv(n, each)
    partial = torch.empty(sequences, splits, heads, dim, dtype=torch.float32, device=q.device)
    logs = torch.empty(sequences, splits, heads, dtype=torch.float32, device=q.device)
    with on(q):
        _part[(sequences, groups, splits)](
            q, k_cache, v_cache, block_table, lengths, blocks, logs, partial, heads, n, each, scale * LOG2E,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
            GROUP=heads // groups, ROWS=power_of_two(heads // groups, 16), D=dim, KEYS=min(cfg["keys"], block_size),
            PAGE=page, SIZE=block_size, N=power_of_two(n), num_warps=cfg["warps"], num_stages=cfg["stages"],
        )  # fmt: skip
        combine(partial, logs, None, out)
    return out


def supports(args: Mapping[str, Any]) -> Support:
    """Head sizes of a power of two from 16 to 256, blocks of one from 16 on; whole groups; contiguous tables."""
    q, k, size = args["q"], args["k_cache"], args.get("block_size", 128)
    dim, heads, groups = q.shape[-1], q.shape[1], k.shape[2]
    tensors, tables = ("q", "k_cache", "v_cache"), ("block_table", "lengths", "blocks")
    gaps = [x for x in tensors if args[x].stride(-1) != 1] + [x for x in tables if not args[x].is_contiguous()]
    return support(
        unknown(args, (*tensors, *tables, "scale", "block_size")),
        dtypes(args, tensors, HALVES),
        dtypes(args, tables, ("int32",)),
        same_dtype(args, tensors),
        one_device(args),
        f"head size {dim}; takes powers of two from 16 to 256" if not 16 <= dim <= 256 or dim & (dim - 1) else "",
        f"blocks of {size}; takes powers of two from 16" if size < 16 or size & (size - 1) else "",
        f"{heads} heads on {groups} key heads" if heads % groups or heads // groups > 128 else "",
        f"{' and '.join(gaps)} with gaps" if gaps else "",
        "no blocks" if not args["blocks"].shape[2] else "",
    )


KERNEL = Kernel(
    op="block_sparse_decode",
    technique="split",
    summary="selected blocks split between programs and combined",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=HALVES, phases=("decode",)),
    supports=supports,
)
