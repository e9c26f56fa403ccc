"""Attention over depth in one pass: an online softmax over the sources, some of them loaded ahead."""

# A launch takes more than the function does:
# pyright: reportCallIssue=false, reportArgumentType=false

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
    {"warps": 16, "ahead": 2, "per_sm": 2},
    {
        "many": [
            {"warps": w, "ahead": a, "per_sm": p}
            for w, a, p in (
                (8, 1, 2), (8, 2, 2), (8, 1, 3), (8, 2, 3), (16, 1, 2), (16, 2, 2), (16, 3, 2), (16, 2, 1),
                (32, 1, 1), (32, 2, 1), (32, 3, 1),
            )
        ],
        "few": [
            {"warps": w, "ahead": a, "per_sm": 1} for w, a in ((8, 4), (16, 2), (16, 4), (16, 9), (32, 4), (32, 9))
        ],
    },
)  # fmt: skip


@triton.jit
def _source(blocks, column, b_block, b_row, b_col, row, inside, INDEX: tl.constexpr):
    return tl.load(blocks + (tl.cast(b_block, tl.int64) * INDEX + row * b_row) + column * b_col, mask=inside, other=0.0)


@triton.jit
def _kernel(
    blocks, prefix, delta, norm_weight, query, out_weight, mixed, updated,
    n_rows, dim, eps, b_block, b_row, b_col, p_row, p_col, d_row, d_col, n_col, q_col, o_col,
    N: tl.constexpr, COLS: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLS)
    inside = column < dim
    key = tl.load(norm_weight + column * n_col, mask=inside, other=0.0).to(tl.float32)
    key *= tl.load(query + column * q_col, mask=inside, other=0.0).to(tl.float32)
    for index in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        tiles = ()
        for i in tl.static_range(AHEAD):
            tiles = tiles + (_source(blocks, column, b_block, b_row, b_col, row, inside, i),)
        v = tl.load(prefix + row * p_row + column * p_col, mask=inside, other=0.0).to(tl.float32)
        v += tl.load(delta + row * d_row + column * d_col, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(updated.dtype.element_ty)
        tl.store(updated + row * dim + column, rounded, mask=inside)
        v = rounded.to(tl.float32)
        best = tl.sum(v * key, 0) * (1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / dim + eps))
        total = 1.0
        mix = v
        for i in tl.static_range(N):
            if i + AHEAD < N:
                tiles = tiles + (_source(blocks, column, b_block, b_row, b_col, row, inside, i + AHEAD),)
            v = tiles[i].to(tl.float32)
            logit = tl.sum(v * key, 0) * (1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / dim + eps))
            top = tl.maximum(best, logit)
            keep = tl.exp(best - top)
            weight = tl.exp(logit - top)
            mix = mix * keep + v * weight
            total = total * keep + weight
            best = top
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
                N=n, COLS=power_of_two(dim, 16), AHEAD=min(n, cfg["ahead"]), NORM=out_weight is not None,
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
    summary="one pass, online softmax over the sources, update and output norm fused",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=FLOATS),
    supports=supports,
)
