"""Attention over depth in one pass: an online softmax over groups of sources, the next row on its way."""

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
from dz.kernels.common.tuned import Tunable, processors

WIDEST, MOST = 16384, 32
TUNE = Tunable(
    "residual_mix/triton",
    {"warps": 8, "group": 4, "stages": 2, "per_sm": 1},
    {
        "many": [
            {"warps": w, "group": n, "stages": g, "per_sm": p}
            for w, n, g, p in (
                (16, 4, 2, 1), (32, 4, 2, 1), (16, 4, 1, 1), (16, 2, 1, 2), (16, 2, 2, 1), (16, 8, 1, 1), (8, 4, 2, 1),
                (8, 2, 1, 3), (16, 1, 2, 1),
            )
        ],
        "few": [
            {"warps": w, "group": n, "stages": 1, "per_sm": 1}
            for w, n in ((8, 8), (16, 8), (16, 4), (32, 8), (32, 4), (32, 2))
        ],
    },
)  # fmt: skip


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _kernel(
    blocks, prefix, delta, norm_weight, query, out_weight, mixed, updated,
    n_rows, dim, eps, b_block, b_row, b_col, p_row, p_col, d_row, d_col, n_col, q_col, o_col,
    N: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLS)
    inside = column < dim
    source = tl.arange(0, GROUP)
    key = tl.load(norm_weight + column * n_col, mask=inside, other=0.0).to(tl.float32)
    key *= tl.load(query + column * q_col, mask=inside, other=0.0).to(tl.float32)
    tile = blocks + source.to(tl.int64)[:, None] * b_block + column[None, :] * b_col
    for index in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        mix = tl.load(prefix + row * p_row + column * p_col, mask=inside, other=0.0).to(tl.float32)
        mix += tl.load(delta + row * d_row + column * d_col, mask=inside, other=0.0).to(tl.float32)
        rounded = mix.to(updated.dtype.element_ty)
        tl.store(updated + row * dim + column, rounded, mask=inside)
        mix = rounded.to(tl.float32)
        dot, square = tl.reduce((mix * key, mix * mix), 0, _both)
        top = dot * (1.0 / tl.sqrt_rn(square / dim + eps))
        total = 1.0
        for first in tl.static_range(0, N, GROUP):
            held = (first + source < N)[:, None] & inside[None, :]
            v = tl.load(tile + (row * b_row + tl.cast(first, tl.int64) * b_block), mask=held, other=0.0).to(tl.float32)
            products, squares = tl.reduce((v * key[None, :], v * v), 1, _both)
            logits = products * (1.0 / tl.sqrt_rn(squares / dim + eps))
            logits = tl.where(first + source < N, logits, float("-inf"))
            best = tl.maximum(tl.max(logits, 0), top)
            keep = tl.exp(top - best)
            weights = tl.exp(logits - best)
            mix = mix * keep + tl.sum(v * weights[:, None], 0)
            total = total * keep + tl.sum(weights, 0)
            top = best
        mix = mix / total
        if NORM:
            mix *= 1.0 / tl.sqrt_rn(tl.sum(mix * mix, 0) / dim + eps)
            mix *= tl.load(out_weight + column * o_col, mask=inside, other=0.0).to(tl.float32)
        tl.store(mixed + row * dim + column, mix.to(mixed.dtype.element_ty), mask=inside)


def run(
    blocks: Tensor,
    prefix: Tensor,
    delta: Tensor,
    norm_weight: Tensor,
    query: Tensor,
    *,
    eps: float = 1e-5,
    out_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See dz.ops.residual_mix.reference."""
    mixed = torch.empty(prefix.shape, dtype=prefix.dtype, device=prefix.device)
    updated = torch.empty_like(mixed)
    n_rows, dim = prefix.shape
    if mixed.numel():
        n, units = blocks.shape[0], processors(prefix.device)
        cfg = TUNE.pick(prefix.device, "few" if n_rows <= units else "many")
        last = query if out_weight is None else out_weight
        with on(prefix):
            _kernel[(min(n_rows, units * cfg["per_sm"]),)](
                blocks, prefix, delta, norm_weight, query, last, mixed, updated, n_rows, dim, eps, *blocks.stride(),
                *prefix.stride(), *delta.stride(), norm_weight.stride(0), query.stride(0), last.stride(0),
                N=n, GROUP=min(cfg["group"], power_of_two(n)), COLS=power_of_two(dim, 16),
                STAGES=cfg["stages"], NORM=out_weight is not None,
                num_warps=min(cfg["warps"], power_of_two(dim // 64)),
            )  # fmt: skip
    return mixed, updated


def supports(args: Mapping[str, Any]) -> Support:
    """Every argument of the op; up to 32 blocks and 16384 columns."""
    blocks, dim = args["blocks"], args["prefix"].shape[-1]
    names = ("blocks", "prefix", "delta", "norm_weight", "query", "out_weight")
    return support(
        unknown(args, (*names, "eps")),
        dtypes(args, names, FLOATS),
        same_dtype(args, ("blocks", "prefix", "delta")),
        one_device(args),
        f"{blocks.shape[0]} blocks; takes at most {MOST}" if blocks.shape[0] > MOST else "",
        f"rows of {dim}; holds at most {WIDEST}" if dim > WIDEST else "",
    )


KERNEL = Kernel(
    op="residual_mix",
    technique="triton",
    summary="one pass, online softmax over groups of sources, update and output norm fused",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=FLOATS),
    supports=supports,
)
