"""MXFP4 folded to FP8 in one pass: whole rows in registers, four codes looked up at a time."""

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
from dz.ops.mxfp4_unpack import BLOCK, blocks

WIDEST = 2048  # blocks of a row (65536 values)
TUNE = Tunable(
    "mxfp4_to_fp8/triton",
    {"rows": 4, "warps": 4},
    {"default": [{"rows": r, "warps": w} for r in (1, 2, 4, 8) for w in (1, 2, 4, 8) if 1 <= 4 * r // w <= 16]},
)


@triton.jit
def _lookup(low, high, selector, ASM: tl.constexpr):
    """Byte i of the result is byte `(selector >> 4i) & 7` of the eight bytes low, high; bit 3 of each nibble is 0."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    out = tl.zeros_like(selector)
    for i in tl.static_range(4):
        index = (selector >> (4 * i)) & 7
        word = tl.where(index < 4, low, high)
        out = out | (((word >> (8 * (index & 3))) & 0xFF) << (8 * i))
    return out


@triton.jit
def _tables(down):
    """The e4m3 bytes of 0, 0.5, 1, 1.5 | 2, 3, 4, 6 times 2^(6 - down), as two words.

    Up to 11 every byte is normal: `(m << 2) + 96 - 8 * down`, one half less for 0.5. From 12 on they are subnormal,
    from 15 on rounded to nearest even, at 19 all zero."""
    base = 96 - 8 * tl.minimum(down, 11)
    low = base * 0x01010100 + 0x0C080000
    high = base * 0x01010101 + 0x1C181410
    low = tl.where(down == 12, 0x0C080400, low)
    high = tl.where(down == 12, 0x1C181410, high)
    low = tl.where(down == 13, 0x06040200, low)
    high = tl.where(down == 13, 0x14100C08, high)
    low = tl.where(down == 14, 0x03020100, low)
    high = tl.where(down == 14, 0x0C080604, high)
    low = tl.where(down == 15, 0x02010000, low)
    high = tl.where(down == 15, 0x06040302, high)
    low = tl.where(down == 16, 0x01000000, low)
    high = tl.where(down == 16, 0x03020201, high)
    low = tl.where(down >= 17, 0, low)
    high = tl.where(down == 17, 0x02010100, high)
    high = tl.where(down == 18, 0x01000000, high)
    high = tl.where(down >= 19, 0, high)
    return low, high


@triton.jit
def _kernel(
    packed, scales, experts, codes, row_scales, spreads, n_rows, rows_each,
    GROUPS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, PICK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    source = row
    if PICK:
        expert = tl.load(experts + row // rows_each, mask=row < n_rows, other=0).to(tl.int64)
        source = expert * rows_each + row % rows_each
    group = tl.arange(0, COLS)[None, :]
    inside = (row < n_rows)[:, None] & (group < GROUPS)
    word = tl.arange(0, 4)[None, None, :]
    at = (source[:, None] * GROUPS + group)[:, :, None] * 4 + word
    w = tl.load(packed + at, mask=inside[:, :, None], other=0)
    e = tl.load(scales + source[:, None] * GROUPS + group, mask=inside, other=0).to(tl.int32)
    magnitudes = w & 0x77777777
    counts = inside & (e != 255) & (tl.max(magnitudes, 2) != 0)
    top = tl.max(tl.where(counts, e, -1), 1)
    bottom = tl.min(tl.where(counts, e, 256), 1)
    down = tl.where(counts, top[:, None] - e, 0)
    low, high = _tables(down)
    low = tl.where(e == 255, 0x7F7F7F7F, low)[:, :, None]
    high = tl.where(e == 255, 0x7F7F7F7F, high)[:, :, None]
    signs = tl.where((e == 255)[:, :, None], 0, (w >> 3) & 0x11111111)
    minus = tl.full([1, 1, 1], 0x8000, tl.int32)
    none = tl.zeros([1, 1, 1], tl.int32)
    even = _lookup(low, high, magnitudes & 0x7777, ASM) | _lookup(minus, none, signs & 0x1111, ASM)
    odd = _lookup(low, high, magnitudes >> 16, ASM) | _lookup(minus, none, signs >> 16, ASM)
    both = tl.reshape(tl.join(even, odd), (ROWS, COLS, 8))
    out = (row[:, None] * GROUPS + group)[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(codes + out, both, mask=inside[:, :, None])
    # 2^(top - 133) from its bits; top below 7 makes a subnormal
    bits = tl.where(top > 6, (top - 6) << 23, 1 << (tl.maximum(top, 0) + 16))
    bits = tl.where(top < 0, 0x3F800000, bits)
    tl.store(row_scales + row, bits.to(tl.float32, bitcast=True), mask=row < n_rows)
    tl.store(spreads + row, tl.where(top < 0, 0, top - bottom), mask=row < n_rows)


def run(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See dz.ops.mxfp4_to_fp8.reference."""
    exps = blocks(packed, scales)[1]
    codes = torch.empty((*exps.shape[:-1], exps.shape[-1] * BLOCK), dtype=torch.float8_e4m3fn, device=packed.device)
    scale = torch.empty(exps.shape[:-1], dtype=torch.float32, device=packed.device)
    return fold(packed, scales, codes, scale, torch.empty_like(scale, dtype=torch.int32))


def fold(
    packed: Tensor, scales: Tensor, codes: Tensor, row_scales: Tensor, spread: Tensor, *, experts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The op written into a contiguous workspace: codes [..., N, K] fp8, row_scales and spread [..., N].

    With `experts` [H] int32, packed and scales hold [E, N, ...] and only the named ones are converted, in this order,
    into the first H of the workspace. An index outside [0, E) is the caller's error and reads out of bounds."""
    source, exps = (t.contiguous() for t in blocks(packed, scales))
    groups = exps.shape[-1]
    rows_each = exps.shape[-2] if exps.dim() > 1 else 1
    n_rows = exps[..., 0].numel() if experts is None else experts.numel() * rows_each
    if n_rows and groups:
        cfg = TUNE.pick(packed.device)
        cols = power_of_two(groups)
        tile = max(1, min(cfg["rows"], 4096 // cols))
        with on(packed):
            _kernel[(triton.cdiv(n_rows, tile),)](
                source.view(torch.int32), exps, exps if experts is None else experts, codes.view(torch.int32),
                row_scales, spread, n_rows, rows_each,
                GROUPS=groups, COLS=cols, ROWS=tile, PICK=experts is not None,
                ASM=packed.is_cuda and torch.version.cuda is not None, num_warps=cfg["warps"],
            )  # fmt: skip
    return codes, row_scales, spread


def supports(args: Mapping[str, Any]) -> Support:
    """Both layouts of the op, rows up to 65536 values."""
    columns = args["scales"].shape[-1] if args["scales"].dim() else 0
    return support(
        unknown(args, ("packed", "scales")),
        dtypes(args, ("packed",), ("uint8", "int8")),
        dtypes(args, ("scales",), ("uint8", "float8_e8m0fnu")),
        one_device(args),
        f"rows of {columns} blocks; holds 1 to {WIDEST}" if not 1 <= columns <= WIDEST else "",
    )


KERNEL = Kernel(
    op="mxfp4_to_fp8",
    technique="triton",
    summary="rows in registers, byte permutes as the table, spread in the same pass",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=("float8_e4m3fn",)),
    supports=supports,
)
