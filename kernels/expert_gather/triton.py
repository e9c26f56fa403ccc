"""A row gathered, its largest magnitude found and its codes written in one pass: the row stays in registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import dtypes, one_device, support, unknown
from dz.kernels.common.tuned import Tunable

WIDEST = 16384
TUNE = Tunable("expert_gather/triton", {"each": 32}, {"default": [{"each": 16}, {"each": 32}, {"each": 64}]})


@triton.jit
def _kernel(x, rows, codes, scales, k, dim, x_row, x_col, COLS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLS)
    token = tl.load(rows + r) // k
    v = tl.load(x + token.to(tl.int64) * x_row + column * x_col, mask=column < dim, other=0.0).to(tl.float32)
    # the largest magnitude as bits: NaN and infinity are the largest of all
    top = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    # 448 is 1.75 * 2^8
    e = (top >> 23) - 127 - 8 + ((top & 0x7FFFFF) > 0x600000).to(tl.int32)
    e = tl.where((top == 0) | (top >= 0x7F800000), 0, tl.maximum(e, -126))
    factor = ((127 - e) << 23).to(tl.float32, bitcast=True)
    code = (v * factor).to(codes.dtype.element_ty)
    out = tl.where(top >= 0x7F800000, 0x7F, code.to(tl.uint8, bitcast=True)).to(tl.uint8)
    tl.store(codes + r * dim + column, out.to(codes.dtype.element_ty, bitcast=True), mask=column < dim)
    tl.store(scales + r, ((e + 127) << 23).to(tl.float32, bitcast=True))


def run(x: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See dz.ops.expert_gather.reference."""
    dim = x.shape[1]
    codes = torch.empty(len(rows), dim, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    if len(rows):
        cols = power_of_two(dim)
        warps = min(16, power_of_two(cols // (32 * TUNE.pick(x.device)["each"])))
        with on(x):
            _kernel[(len(rows),)](x, rows.contiguous(), codes, scales, k, dim, *x.stride(), COLS=cols, num_warps=warps)
    return codes, scales


def supports(args: Mapping[str, Any]) -> Support:
    """Any strides; rows up to 16384 numbers."""
    dim = args["x"].shape[1]
    return support(
        unknown(args, ("x", "rows", "k")),
        dtypes(args, ("x",), ("bfloat16", "float16")),
        dtypes(args, ("rows",), ("int32", "int64")),
        one_device(args),
        f"rows of {dim}; holds at most {WIDEST}" if dim > WIDEST else "",
    )


KERNEL = Kernel(
    op="expert_gather",
    technique="triton",
    summary="gathered, scaled and rounded in one pass",
    run=run,
    requires=Requires(device=("cuda",), arch=(89, None), dtypes=("bfloat16", "float16")),
    supports=supports,
)
