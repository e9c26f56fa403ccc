"""Block scores by matrix products whose tiles are reduced to one maximum a row, then a selection of whole rows."""

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

MOST = 16384  # blocks of a row
TUNE = Tunable(
    "block_select/triton",
    {"rows": 128, "warps": 8, "stages": 3, "chunk": 32, "pick_rows": 4, "pick_warps": 4},
    {
        "default": [
            {"rows": r, "warps": w, "stages": s, "chunk": c, "pick_rows": pr, "pick_warps": pw}
            for r, w, s, c, pr, pw in (
                (128, 8, 3, 64, 4, 4),
                (128, 4, 2, 64, 8, 4),
                (128, 4, 3, 64, 4, 2),
                (64, 4, 3, 64, 4, 1),
                (128, 8, 2, 128, 2, 2),
                (256, 8, 2, 64, 8, 8),
                (128, 8, 4, 256, 1, 1),
            )
        ]
    },
)


@triton.jit
def _score(
    q, k, positions, scores, n_queries, n_keys, n_blocks, q_row, q_head, k_row, k_head,
    GROUP: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """scores [key heads, blocks, queries * GROUP] fp32."""
    head = tl.program_id(1)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = r // GROUP
    real = query < n_queries
    d = tl.arange(0, D)
    at = query.to(tl.int64)[:, None] * q_row + (head * GROUP + r % GROUP)[:, None] * q_head + d[None, :]
    rows = tl.load(q + at, mask=real[:, None], other=0.0)
    position = tl.load(positions + query, mask=real, other=-1)
    nearest = tl.min(tl.where(real, position, 2147483647), 0)
    first = tl.program_id(2) * CHUNK
    line = scores + head.to(tl.int64) * n_blocks * (n_queries * GROUP) + r
    column = tl.arange(0, SIZE)
    for block in range(first, tl.minimum(first + CHUNK, n_blocks)):
        key = block * SIZE + column
        keys = tl.load(
            k + key.to(tl.int64)[:, None] * k_row + head * k_head + d[None, :], mask=(key < n_keys)[:, None], other=0.0
        )
        if PRECISE:
            s = tl.dot(rows, tl.trans(keys), input_precision="ieee")
        else:
            s = tl.dot(rows, tl.trans(keys))
        if (block * SIZE + SIZE > n_keys) | (block * SIZE + SIZE > nearest):
            s = tl.where((key[None, :] <= position[:, None]) & (key < n_keys)[None, :], s, float("-inf"))
        best = tl.where(position // SIZE == block, float("inf"), tl.max(s, 1))
        tl.store(line + tl.cast(block, tl.int64) * (n_queries * GROUP), best, mask=real)


@triton.jit
def _pick(
    scores, out, n_blocks, n_rows, heads, top_k,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.arange(0, BLOCKS)
    line = scores + head.to(tl.int64) * n_blocks * n_rows
    inside = (b < n_blocks)[:, None] & (r < n_rows)[None, :]
    x = tl.load(line + b.to(tl.int64)[:, None] * n_rows + r[None, :], mask=inside, other=float("-inf"))
    x = tl.trans(x)
    slot = tl.arange(0, TOP)[None, :]
    chosen = tl.full([ROWS, TOP], 2147483647, tl.int32)
    for i in range(top_k):
        best = tl.max(x, 1)
        at = tl.min(tl.where(x == best[:, None], b[None, :], BLOCKS), 1)
        chosen = tl.where((slot == i) & (best > float("-inf"))[:, None], at[:, None], chosen)
        x = tl.where(b[None, :] == at[:, None], float("-inf"), x)
    chosen = tl.sort(chosen, 1)
    chosen = tl.where(chosen == 2147483647, -1, chosen)
    o = ((r // GROUP).to(tl.int64) * heads + head * GROUP + r % GROUP)[:, None] * top_k + slot
    tl.store(out + o, chosen, mask=(r < n_rows)[:, None] & (slot < top_k))


def run(q: Tensor, k: Tensor, positions: Tensor, *, block_size: int = 128, top_k: int = 16) -> Tensor:
    """See dz.ops.block_select.reference. Scratch: 4 bytes for each query, head and block."""
    queries, heads, dim = q.shape
    keys, key_heads, _ = k.shape
    out = torch.empty(queries, heads, top_k, dtype=torch.int32, device=q.device)
    if not out.numel():
        return out
    group, count = heads // key_heads, triton.cdiv(keys, block_size)
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    scores = torch.empty(key_heads, count, queries * group, dtype=torch.float32, device=q.device)
    cfg = TUNE.pick(q.device)
    rows = min(cfg["rows"], power_of_two(queries * group, 16))
    blocks = power_of_two(count)
    pick_rows = max(1, min(cfg["pick_rows"], 16384 // blocks))
    with on(q):
        _score[(triton.cdiv(queries * group, rows), key_heads, triton.cdiv(count, cfg["chunk"]))](
            q, k, positions, scores, queries, keys, count, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            GROUP=group, D=dim, SIZE=block_size, ROWS=rows, CHUNK=cfg["chunk"], PRECISE=q.dtype == torch.float32,
            num_warps=cfg["warps"], num_stages=cfg["stages"],
        )  # fmt: skip
        _pick[(triton.cdiv(queries * group, pick_rows), key_heads)](
            scores, out, count, queries * group, heads, top_k,
            GROUP=group, BLOCKS=blocks, ROWS=pick_rows, TOP=power_of_two(top_k), num_warps=cfg["pick_warps"],
        )  # fmt: skip
    return out


def supports(args: Mapping[str, Any]) -> Support:
    """Head sizes and block sizes that are powers of two from 16 on; whole groups of heads; up to 16384 blocks."""
    q, k, size = args["q"], args["k"], args.get("block_size", 128)
    dim, count = q.shape[-1], triton.cdiv(k.shape[0], size)
    return support(
        unknown(args, ("q", "k", "positions", "block_size", "top_k")),
        dtypes(args, ("q", "k"), FLOATS),
        dtypes(args, ("positions",), ("int32",)),
        same_dtype(args, ("q", "k")),
        one_device(args),
        f"head size {dim}; takes powers of two from 16" if dim < 16 or dim & (dim - 1) else "",
        f"blocks of {size}; takes powers of two from 16 to 256" if not 16 <= size <= 256 or size & (size - 1) else "",
        f"{q.shape[1]} heads on {k.shape[1]} key heads" if q.shape[1] % k.shape[1] else "",
        f"{count} blocks; takes 1 to {MOST}" if not 1 <= count <= MOST else "",
        "positions with gaps" if not args["positions"].is_contiguous() else "",
    )


KERNEL = Kernel(
    op="block_select",
    technique="triton",
    summary="matrix-product tiles reduced to block maxima, then rows selected in registers",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=FLOATS),
    supports=supports,
)
