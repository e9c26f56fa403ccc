"""FP8 products of experts on a persistent grid: tiles found from the offsets on the device, sums in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.groups import find_tile, group_tiles
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import dtypes, one_device, support, unknown
from dz.kernels.common.tuned import Tunable, processors
from dz.ops.grouped_gemm_fp8 import check_offsets

DEEP = 128  # of K between two additions in fp32: the tensor cores keep about 14 bits of an FP8 sum
MOST = 1023  # experts
TUNE = Tunable(
    "grouped_gemm_fp8/triton",
    {"rows": 128, "columns": 128, "warps": 4, "stages": 3, "per_sm": 2},
    {
        "default": [
            {"rows": r, "columns": c, "warps": w, "stages": s, "per_sm": p}
            for r, c, w, s, p in ((128, 128, 4, 3, 2), (64, 128, 4, 4, 2), (128, 256, 8, 4, 1))
        ]
    },
)  # two programs an SM: one adds while the other multiplies


@triton.jit
def _tile(
    x, w, x_scale, w_scale, out, row, end, base, column, k_end, n_columns, s_expert, s_column, expert,
    ROWS: tl.constexpr, TALL: tl.constexpr, COLS: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Rows [row, end) by columns from `column`, at most TALL pieces of ROWS by BROAD pieces of COLS; `base` is the
    expert's first row in the stack of weights. Pieces keep the temporary of a promotion small."""
    sums = ()
    for _ in tl.static_range(TALL * BROAD):
        sums = sums + (tl.zeros([ROWS, COLS], tl.float32),)
    for k in range(0, k_end, DEEP):
        new = ()
        left = ()
        for t in tl.static_range(TALL):
            left = left + (x.load([row + t * ROWS, k]),)
        for h in tl.static_range(BROAD):
            right = w.load([base + column + h * COLS, k]).T
            for t in tl.static_range(TALL):
                # a product of its own and an addition; max_num_imprecise_acc says the same, but its instructions wait
                # for one another
                new = new + (sums[h * TALL + t] + tl.dot(left[t], right),)
        sums = new
    for h in tl.static_range(BROAD):
        # scales of rows that belong to no expert may be anything: k_end is 0 there
        c = column + h * COLS + tl.arange(0, COLS)
        at = w_scale + expert * s_expert + c * s_column
        columns = tl.load(at, mask=c < tl.where(k_end > 0, n_columns, 0), other=0.0)[None, :]
        for t in tl.static_range(TALL):
            r = row + t * ROWS + tl.arange(0, ROWS)
            rows = tl.load(x_scale + r, mask=r < tl.where(k_end > 0, end, 0), other=0.0)[:, None]
            value = (sums[h * TALL + t] * rows * columns).to(out.dtype.element_ty)
            at = r.to(tl.int64)[:, None] * n_columns + c[None, :]
            tl.store(out + at, value, mask=(r < end)[:, None] & (c < n_columns)[None, :])


@triton.jit
def _kernel(
    x, x_half, w, x_scale, w_scale, offsets, taken, out, n_rows, n_columns, depth, experts, s_expert, s_column,
    ROWS: tl.constexpr, PIECE: tl.constexpr, HALF: tl.constexpr, HALF_PIECE: tl.constexpr, COLS: tl.constexpr,
    BROAD: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n_columns, COLS * BROAD)
    before, tiles, total = group_tiles(offsets, n_rows, experts, across, ROWS, WIDE)
    tile = tl.program_id(0)
    while tile < total:
        # Tiles are taken as programs come free: whole and half ones alternate at a period that may divide the grid's,
        # and then a fixed share would be all whole ones for some programs. The next is asked for ahead of the work.
        following = tl.atomic_add(taken, 1) + tl.num_programs(0)
        e, row, end, column = find_tile(tile, before, tiles, offsets, n_rows, experts, ROWS, WIDE)
        column *= COLS * BROAD
        k_end = depth if e < experts else 0  # rows of no expert: no products, zeros
        if ROWS == HALF or end - row > HALF:
            _tile(
                x, w, x_scale, w_scale, out, row, end, e * n_columns, column, k_end, n_columns, s_expert, s_column, e,
                PIECE, ROWS // PIECE, COLS, BROAD, DEEP,
            )  # fmt: skip
        else:
            _tile(
                x_half, w, x_scale, w_scale, out, row, end, e * n_columns, column, k_end, n_columns, s_expert, s_column,
                e, HALF_PIECE, HALF // HALF_PIECE, COLS, BROAD, DEEP,
            )  # fmt: skip
        tile = following


def run(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, *, dtype: str = "bfloat16"
) -> Tensor:
    """See dz.ops.grouped_gemm_fp8.reference."""
    experts, n, k = weight.shape
    check_offsets(offsets, experts)
    out = torch.empty(x.shape[0], n, dtype=getattr(torch, dtype), device=x.device)
    if not out.numel():
        return out
    cfg = TUNE.pick(x.device)
    rows, columns, warps = cfg["rows"], min(cfg["columns"], 128), cfg["warps"]
    half = max(rows // 2, 64)  # 64: the least that the tensor cores take in one piece
    piece, half_piece = min(rows, 16 * warps), min(half, 16 * warps)
    taken = torch.zeros(1, dtype=torch.int32, device=x.device)
    with on(x):
        _kernel[(processors(x.device) * cfg["per_sm"],)](
            TensorDescriptor.from_tensor(x, [piece, DEEP]), TensorDescriptor.from_tensor(x, [half_piece, DEEP]),
            TensorDescriptor.from_tensor(weight.view(experts * n, k), [columns, DEEP]), x_scale.contiguous(),
            weight_scale, offsets.to(torch.int32).contiguous(), taken, out, x.shape[0], n, k, experts,
            *weight_scale.stride(),
            ROWS=rows, PIECE=piece, HALF=half, HALF_PIECE=half_piece, COLS=columns, BROAD=cfg["columns"] // columns,
            DEEP=DEEP, WIDE=power_of_two(experts + 1), num_warps=warps, num_stages=cfg["stages"],
        )  # fmt: skip
    return out


def supports(args: Mapping[str, Any]) -> Support:
    """Rows of a multiple of 16 values without gaps inside, weights contiguous."""
    x, weight = args["x"], args["weight"]
    aligned = x.stride(-1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 and x.shape[-1] % 16 == 0
    return support(
        unknown(args, ("x", "x_scale", "weight", "weight_scale", "offsets", "dtype")),
        dtypes(args, ("x", "weight"), ("float8_e4m3fn",)),
        dtypes(args, ("x_scale", "weight_scale"), ("float32",)),
        dtypes(args, ("offsets",), ("int32", "int64")),
        one_device(args),
        ""
        if aligned or not x.numel()
        else f"rows of {x.shape[-1]}, strides {x.stride()}; takes aligned multiples of 16",
        "" if weight.is_contiguous() else "weights that are not contiguous",
        f"{weight.shape[0]} experts; takes at most {MOST}" if weight.shape[0] > MOST else "",
    )


KERNEL = Kernel(
    op="grouped_gemm_fp8",
    technique="triton",
    summary="persistent tiles, tensor copies, half a tile for an expert's last rows, fp32 sums every 128",
    run=run,
    requires=Requires(device=("cuda",), arch=(90, None), dtypes=("bfloat16",)),
    supports=supports,
)
