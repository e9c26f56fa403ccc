"""RMS normalisation in one pass: a tile of whole rows is held in registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two, rows, warps_for
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, same_dtype, support, unknown

WIDEST = 32768  # elements of a row: 64 fp32 registers for each of 512 threads
TILE = 4096  # elements of a tile when rows are short


@triton.jit
def _kernel(
    x, residual, weight, out, hidden,
    n_rows, dim, x_row, x_col, r_row, r_col, w_col, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, CAST_FIRST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    col = tl.arange(0, COLS)[None, :].to(tl.int64)
    inside = (row < n_rows) & (col < dim)
    dtype = x.dtype.element_ty
    h = tl.load(x + row * x_row + col * x_col, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h = h + tl.load(residual + row * r_row + col * r_col, mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(dtype)
        tl.store(hidden + row * dim + col, rounded, mask=inside)
        h = rounded.to(tl.float32)
    y = h * (1.0 / tl.sqrt_rn(tl.sum(h * h, 1) / dim + eps))[:, None]
    if HAS_WEIGHT:
        w = tl.load(weight + col * w_col, mask=col < dim, other=0.0)
        if CAST_FIRST:
            y = y.to(dtype).to(tl.float32) * (w.to(tl.float32) + offset).to(w.dtype).to(tl.float32)
        else:
            y = y * (w.to(tl.float32) + offset)
    tl.store(out + row * dim + col, y.to(out.dtype.element_ty), mask=inside)


def run(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_first: bool = True,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See dz.ops.rms_norm.reference."""
    promoted = torch.promote_types(x.dtype, weight.dtype) if weight is not None and cast_first else x.dtype
    out = torch.empty(x.shape, dtype=promoted, device=x.device)
    hidden = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is not None else None
    if x.numel():
        flat, r, w = rows(x), rows(x if residual is None else residual), x if weight is None else weight
        n_rows, dim = flat.shape
        cols = power_of_two(dim, 16)
        tile = max(1, min(TILE // cols, power_of_two(n_rows)))
        with on(x):
            _kernel[(triton.cdiv(n_rows, tile),)](
                flat, r, w, out, out if hidden is None else hidden,
                n_rows, dim, flat.stride(0), flat.stride(1), r.stride(0), r.stride(1), w.stride(-1), eps, offset,
                HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, CAST_FIRST=cast_first,
                ROWS=tile, COLS=cols, num_warps=warps_for(tile * cols),
            )  # fmt: skip
    return out if hidden is None else (out, hidden)


def supports(args: Mapping[str, Any]) -> Support:
    """Every argument of the op; rows up to WIDEST, x and residual of one shape and dtype, a weight of one row."""
    x, weight, residual = args["x"], args.get("weight"), args.get("residual")
    return support(
        unknown(args, ("x", "weight", "eps", "offset", "cast_first", "residual")),
        dtypes(args, ("x", "weight"), FLOATS),
        same_dtype(args, ("x", "residual")),
        one_device(args),
        f"rows of {x.shape[-1]}; holds at most {WIDEST}" if x.shape[-1] > WIDEST else "",
        f"a residual of shape {list(residual.shape)}" if residual is not None and residual.shape != x.shape else "",
        f"a weight of shape {list(weight.shape)}" if weight is not None and weight.shape != x.shape[-1:] else "",
    )


KERNEL = Kernel(
    op="rms_norm",
    technique="triton",
    summary="one pass, rows in registers, residual and offset fused",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=FLOATS),
    supports=supports,
)
