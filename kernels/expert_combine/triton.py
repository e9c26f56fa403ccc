"""The sum over a token's experts, each element read once and added in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, support, unknown
from dz.kernels.common.tuned import Tunable

MOST = 64  # experts of a token
TUNE = Tunable(
    "expert_combine/triton",
    {"columns": 1024, "warps": 4},
    {"default": [{"columns": c, "warps": w} for c, w in ((512, 2), (1024, 4), (1024, 2), (2048, 4), (4096, 8))]},
)


@triton.jit
def _kernel(y, places, weight, out, dim, y_row, y_col, p_row, p_col, w_row, w_col, K: tl.constexpr, COLS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], tl.float32)
    for k in tl.static_range(K):  # unrolled: the loads of all rows are under way together
        place = tl.load(places + token * p_row + k * p_col)
        factor = tl.load(weight + token * w_row + k * w_col)
        at = y + tl.maximum(place, 0).to(tl.int64) * y_row + column * y_col
        row = tl.load(at, mask=column < tl.where(place >= 0, dim, 0), other=0.0).to(tl.float32)
        total += tl.where(place >= 0, factor, 0.0) * row
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=column < dim)


def run(y: Tensor, places: Tensor, weight: Tensor) -> Tensor:
    """See dz.ops.expert_combine.reference."""
    tokens, dim = places.shape[0], y.shape[1]
    out = torch.empty(tokens, dim, dtype=y.dtype, device=y.device)
    if out.numel():
        cfg = TUNE.pick(y.device)
        columns = min(cfg["columns"], power_of_two(dim))
        with on(y):
            _kernel[(tokens, triton.cdiv(dim, columns))](
                y, places, weight, out, dim, *y.stride(), *places.stride(), *weight.stride(),
                K=places.shape[1], COLS=columns, num_warps=cfg["warps"],
            )  # fmt: skip
    return out


def supports(args: Mapping[str, Any]) -> Support:
    """Any strides; up to 64 experts a token."""
    k = args["places"].shape[1]
    return support(
        unknown(args, ("y", "places", "weight")),
        dtypes(args, ("y",), FLOATS),
        dtypes(args, ("places",), ("int32", "int64")),
        dtypes(args, ("weight",), ("float32",)),
        one_device(args),
        f"{k} experts a token; takes at most {MOST}" if k > MOST else "",
    )


KERNEL = Kernel(
    op="expert_combine",
    technique="triton",
    summary="a token's rows loaded together, summed in fp32",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=FLOATS),
    supports=supports,
)
