"""MXFP4 products of experts: codes become bfloat16 in the registers from which the tensor cores read them.

The weights are the left operand (they fill its 64 rows, however few tokens there are), K in an order that costs no
exchange between threads: a thread loads 16 bytes, one block of 32 codes under one scale, and four neighbours hold 128 of
K. Of a word of eight codes, codes i and i + 4 share a register once shifted into place; so position
(word, i / 2, i % 2, thread, half) of K in the product is `32 * thread + 8 * word + i + 4 * half` of the row, and the
activations are brought into the same order.
"""

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
from dz.kernels.common.groups import find_tile, group_tiles
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import dtypes, one_device, support, unknown
from dz.kernels.common.tuned import Tunable, processors
from dz.ops.grouped_gemm_fp8 import check_offsets
from dz.ops.mxfp4_unpack import blocks

MOST = 1023  # experts
TUNE = Tunable(
    "grouped_gemm_mxfp4/triton",
    {"rows": 16, "columns": 64, "deep": 128, "warps": 4, "stages": 4, "per_sm": 5},
    {
        bucket: [{"rows": r, "columns": c, "deep": k, "warps": w, "stages": s, "per_sm": p} for c, k, w, s, p in tiles]
        for bucket, r, tiles in (
            ("few", 16, ((64, 128, 4, 4, 5), (64, 256, 4, 3, 3), (64, 256, 4, 4, 2), (128, 128, 8, 4, 2))),
            ("some", 32, ((64, 128, 4, 4, 4), (64, 256, 4, 3, 2), (128, 128, 8, 4, 2))),
            ("many", 64, ((64, 128, 4, 4, 3), (128, 128, 8, 4, 2), (128, 128, 8, 3, 2))),
            ("most", 128, ((128, 128, 8, 4, 1), (128, 128, 8, 3, 2), (64, 128, 4, 3, 2))),
        )
    },
)


@triton.jit
def _pair(word, scale, LOW: tl.constexpr):
    """Codes LOW and LOW + 4 of a word times the scale, two bfloat16 numbers in a word, by plain arithmetic."""
    out = tl.zeros_like(word)
    for half in tl.static_range(2):
        code = (word >> (4 * LOW + 16 * half)) & 15
        big = code & 7
        # the bits of 0, 0.5, 1, 1.5, 2, 3, 4, 6 in fp32: one exponent for two codes, except the first two
        bits = tl.where(big > 1, (big << 22) + 0x3F000000, tl.where(big == 1, 0x3F000000, 0)) | ((code >> 3) << 31)
        value = bits.to(tl.float32, bitcast=True) * ((scale & 0xFFFF) << 16).to(tl.float32, bitcast=True)
        out = out | (((value.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) << (16 * half))
    return out


@triton.jit
def _pairs(word, scale, ASM: tl.constexpr):
    """The four pairs (codes i and i + 4) of a word of eight codes, times a pair of equal scales.

    A code's three low bits are the last two of an exponent and the first of a fraction: put there they are the number
    times 2^-126, 0.5 included, as it is a subnormal one."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, up;
            mov.b32 up, 0x7E807E80;
            shl.b32 a, $4, 6; and.b32 a, a, 0x01C001C0; shl.b32 b, $4, 12; and.b32 b, b, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 a, a, up; mul.bf16x2 $0, a, $5;
            shl.b32 a, $4, 2; and.b32 a, a, 0x01C001C0; shl.b32 b, $4, 8; and.b32 b, b, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 a, a, up; mul.bf16x2 $1, a, $5;
            shr.u32 a, $4, 2; and.b32 a, a, 0x01C001C0; shl.b32 b, $4, 4; and.b32 b, b, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 a, a, up; mul.bf16x2 $2, a, $5;
            shr.u32 a, $4, 6; and.b32 a, a, 0x01C001C0; and.b32 b, $4, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 a, a, up; mul.bf16x2 $3, a, $5;
            }""",
            "=r,=r,=r,=r,r,r", [word, scale], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return _pair(word, scale, 0), _pair(word, scale, 1), _pair(word, scale, 2), _pair(word, scale, 3)


@triton.jit
def _weights(words, exponents, COLS: tl.constexpr, DEEP: tl.constexpr, ASM: tl.constexpr):
    """[COLS, DEEP] bfloat16 in the order of the product, from words [COLS, DEEP / 8], scale bytes [COLS, DEEP / 32]."""
    scale = tl.where(exponents == 0, 0x40, exponents << 7)  # 2^-127 is a subnormal number
    scale = tl.where(exponents == 255, 0x7FC0, scale)
    scale = scale | (scale << 16)
    p0, p1, p2, p3 = _pairs(tl.reshape(words, (COLS, DEEP // 32, 4)), scale[:, :, None], ASM)
    both = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # ..., i / 2, i % 2
    low = (both & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    all = tl.reshape(tl.join(low, high), (COLS, DEEP // 128, 4, 4, 2, 2, 2))  # piece, thread, word, i / 2, i % 2, half
    return tl.reshape(tl.permute(all, (0, 1, 3, 4, 5, 2, 6)), (COLS, DEEP))


@triton.jit
def _activations(rows, ROWS: tl.constexpr, DEEP: tl.constexpr):
    """[ROWS, DEEP] in the order of the product."""
    rows = tl.reshape(rows, (ROWS, DEEP // 128, 4, 4, 2, 2, 2))  # piece, thread, word, half, i / 2, i % 2
    return tl.reshape(tl.permute(rows, (0, 1, 3, 5, 6, 2, 4)), (ROWS, DEEP))


@triton.jit
def _kernel(
    x, packed, scales, offsets, out, n_rows, n_columns, depth, experts, x_row, x_col, w_row, s_row,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n_columns, COLS)
    before, tiles, total = group_tiles(offsets, n_rows, experts, across, ROWS, WIDE)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        e, row, end, column = find_tile(tile, before, tiles, offsets, n_rows, experts, ROWS, WIDE)
        n = column * COLS + tl.arange(0, COLS)
        m = row + tl.arange(0, ROWS)
        # past the end the last row and column once more: nothing of them is stored
        weight_row = tl.cast(e, tl.int64) * n_columns + tl.minimum(n, n_columns - 1)
        w_at = packed + weight_row[:, None] * w_row
        s_at = scales + weight_row[:, None] * s_row
        x_at = x + tl.minimum(m, end - 1).to(tl.int64)[:, None] * x_row
        sums = tl.zeros([COLS, ROWS], tl.float32)
        steps = tl.cdiv(depth, DEEP)
        for step in range(steps if e < experts else 0):  # rows of no expert: zeros
            w_k = step * (DEEP // 8) + tl.arange(0, DEEP // 8)[None, :]
            x_k = step * DEEP + tl.arange(0, DEEP)[None, :]
            if EVEN:
                words = tl.load(w_at + w_k)
                of_four = tl.load(s_at + step * (DEEP // 128) + tl.arange(0, DEEP // 128)[None, :])
                shift = 8 * tl.arange(0, 4)[None, None, :]
                exponents = tl.reshape((of_four[:, :, None] >> shift) & 255, (COLS, DEEP // 32))
                rows = tl.load(x_at + x_k * x_col)
            else:
                s_k = step * (DEEP // 32) + tl.arange(0, DEEP // 32)[None, :]
                words = tl.load(w_at + w_k, mask=w_k < depth // 8, other=0)
                exponents = tl.load(s_at + s_k, mask=s_k < depth // 32, other=0).to(tl.int32)
                rows = tl.load(x_at + x_k * x_col, mask=x_k < depth, other=0.0)
            left = _weights(words, exponents, COLS, DEEP, ASM)
            sums = tl.dot(left, _activations(rows, ROWS, DEEP).T, sums)
        at = m.to(tl.int64)[None, :] * n_columns + n[:, None]
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=(m < end)[None, :] & (n < n_columns)[:, None])


def run(x: Tensor, packed: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """See dz.ops.grouped_gemm_mxfp4.reference."""
    codes, exponents = blocks(packed, scales)
    experts, n, groups = exponents.shape
    check_offsets(offsets, experts)
    out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    each = x.shape[0] / experts
    cfg = TUNE.pick(x.device, "few" if each <= 12 else "some" if each <= 24 else "many" if each <= 48 else "most")
    even = groups * 32 % cfg["deep"] == 0 and exponents.data_ptr() % 4 == 0
    with on(x):
        _kernel[(processors(x.device) * cfg["per_sm"],)](
            x, codes.view(torch.int32), exponents.view(torch.int32) if even else exponents,
            offsets.to(torch.int32).contiguous(), out, x.shape[0], n, groups * 32, experts, *x.stride(),
            groups * 4, groups // 4 if even else groups,
            ROWS=cfg["rows"], COLS=cfg["columns"], DEEP=cfg["deep"], WIDE=power_of_two(experts + 1), EVEN=even,
            ASM=x.is_cuda, num_warps=cfg["warps"], num_stages=cfg["stages"],
        )  # fmt: skip
    return out


def supports(args: Mapping[str, Any]) -> Support:
    """bfloat16 rows with any strides; weights contiguous, of both layouts."""
    packed, scales = args["packed"], args["scales"]
    return support(
        unknown(args, ("x", "packed", "scales", "offsets")),
        dtypes(args, ("x",), ("bfloat16",)),
        dtypes(args, ("packed",), ("uint8", "int8")),
        dtypes(args, ("scales",), ("uint8", "float8_e8m0fnu")),
        dtypes(args, ("offsets",), ("int32", "int64")),
        one_device(args),
        "" if packed.is_contiguous() and scales.is_contiguous() else "weights that are not contiguous",
        f"codes at {packed.data_ptr():#x}; takes multiples of 16" if packed.data_ptr() % 16 else "",
        f"{scales.shape[0]} experts; takes at most {MOST}" if scales.shape[0] > MOST else "",
    )


KERNEL = Kernel(
    op="grouped_gemm_mxfp4",
    technique="triton",
    summary="dequantised in registers as the left operand, K reordered so that no thread exchanges a weight",
    run=run,
    requires=Requires(device=("cuda",), arch=(90, None), dtypes=("bfloat16",)),
    supports=supports,
)
