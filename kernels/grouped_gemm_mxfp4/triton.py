"""MXFP4 products of experts: codes become bfloat16 in the registers from which the tensor cores read them.

The weights are the left operand (they fill its 64 rows, however few tokens there are), K in an order that costs no
exchange between threads: a thread loads 16 bytes, one block of 32 codes under one scale, and four neighbours hold 128
of K. Rows change places too: a warp loads rows 8 w to 8 w + 7 of either half, and multiplies them as its rows 0 to 15.
Of a word of eight codes, codes i and i + 4 share a register once shifted into place; so position
(word, i / 2, i % 2, thread, half) of K in the product is `32 * thread + 8 * word + i + 4 * half` of the row, and the
activations are brought into the same order.
"""

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
NAMES = ("rows", "columns", "warps", "stages", "registers", "per_sm", "split", "arranged")
SPACE = {
    "one": ((16, 64, 4, 4, 96, 5, 4, 0), (16, 64, 4, 4, 96, 5, 7, 0), (16, 64, 4, 4, 96, 5, 2, 0)),
    "few": ((16, 64, 4, 4, 96, 5, 1, 0), (16, 64, 4, 4, 96, 5, 2, 0), (16, 128, 4, 4, 255, 2, 1, 0)),
    "some": ((16, 128, 4, 4, 128, 4, 1, 1), (16, 64, 4, 4, 96, 5, 1, 0), (16, 128, 4, 4, 255, 2, 1, 0)),
    "many": ((32, 128, 4, 4, 168, 3, 1, 1), (32, 128, 4, 4, 255, 2, 1, 0), (64, 128, 8, 4, 128, 2, 1, 1)),
    "most": ((128, 128, 8, 3, 255, 1, 1, 1), (128, 64, 4, 3, 255, 2, 1, 1), (64, 128, 8, 4, 128, 2, 1, 1)),
}
TUNE = Tunable(
    "grouped_gemm_mxfp4/triton",
    # registers of a thread, at most: another program in flight is worth a few spilled
    dict(zip(NAMES, SPACE["some"][0], strict=True)),
    {bucket: [dict(zip(NAMES, c, strict=True)) for c in configs] for bucket, configs in SPACE.items()},
)


@triton.jit
def _pair(word, scale, LOW: tl.constexpr):
    """Codes LOW and LOW + 4 of a word times the scale, two bfloat16 numbers in a word, by plain arithmetic."""
    out = tl.zeros_like(word)
    for half in tl.static_range(2):
        code = (word >> (4 * LOW + 16 * half)) & 15
        value = (((code & 7) << 22) | ((code >> 3) << 31)).to(tl.float32, bitcast=True)
        value = value * ((scale & 0xFFFF) << 16).to(tl.float32, bitcast=True)
        out = out | (((value.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) << (16 * half))
    return out


@triton.jit
def _pairs(word, scale, ASM: tl.constexpr):
    """The four pairs (codes i and i + 4) of a word of eight codes, times a pair of equal scales.

    A code's three low bits are the last two of an exponent and the first of a fraction: put there they are the number
    times 2^-126, 0.5 included, as it is a subnormal one. The scale makes up for it."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shl.b32 a, $4, 6; and.b32 a, a, 0x01C001C0; shl.b32 b, $4, 12; and.b32 b, b, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 $0, a, $5;
            shl.b32 a, $4, 2; and.b32 a, a, 0x01C001C0; shl.b32 b, $4, 8; and.b32 b, b, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 $1, a, $5;
            shr.u32 a, $4, 2; and.b32 a, a, 0x01C001C0; shl.b32 b, $4, 4; and.b32 b, b, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 $2, a, $5;
            shr.u32 a, $4, 6; and.b32 a, a, 0x01C001C0; and.b32 b, $4, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 $3, a, $5;
            }""",
            "=&r,=&r,=&r,=&r,r,r", [word, scale], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return _pair(word, scale, 0), _pair(word, scale, 1), _pair(word, scale, 2), _pair(word, scale, 3)


@triton.jit
def _weights(words, exponents, down, COLS: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr):
    """[COLS, 128] bfloat16 in the order of the product, times 2^-down, from words [COLS, 16] and scale bytes
    [COLS, 4]."""
    scale = (exponents + (126 - down)) * 0x00800080  # 2^(byte - 1 - down), twice: a number up to byte 128 + down
    scale = tl.where(exponents == 255, 0x7FC07FC0, scale)
    p0, p1, p2, p3 = _pairs(tl.reshape(words, (COLS, 4, 4)), scale[:, :, None], ASM)
    both = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # ..., i / 2, i % 2
    low = (both & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    # 16 rows for each warp, half, warp, row of eight, thread, word, i / 2, i % 2, code of a pair
    all = tl.reshape(tl.join(low, high), (COLS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(all, (0, 2, 1, 3, 5, 6, 7, 4, 8)), (COLS, 128))


@triton.jit
def _activations(rows, ROWS: tl.constexpr):
    """[ROWS, 128] in the order of the product."""
    rows = tl.reshape(rows, (ROWS, 4, 4, 2, 2, 2))  # thread, word, code of a pair, i / 2, i % 2
    return tl.reshape(tl.permute(rows, (0, 2, 4, 5, 1, 3)), (ROWS, 128))


@triton.jit
def _products(
    x_at, w_at, s_at, groups, begin, end, down,
    ROWS: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr, ARRANGED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """(sums [COLS, ROWS] times 2^-down over the steps of 128 from begin to end, the largest scale byte seen)."""
    sums = tl.zeros([COLS, ROWS], tl.float32)
    largest = tl.zeros([COLS, 4], tl.int32)
    for step in range(begin, end):
        w_k = step * 16 + tl.arange(0, 16)[None, :]
        x_k = step * 128 + tl.arange(0, 128)[None, :]
        if EVEN:  # four scale bytes of a row are one word
            words = tl.load(w_at + w_k)
            of_four = tl.load(s_at + step + tl.arange(0, 1)[None, :])
            exponents = tl.reshape((of_four[:, :, None] >> (8 * tl.arange(0, 4)[None, None, :])) & 255, (COLS, 4))
        else:
            s_k = step * 4 + tl.arange(0, 4)[None, :]
            words = tl.load(w_at + w_k, mask=w_k < groups * 4, other=0)
            exponents = tl.load(s_at + s_k, mask=s_k < groups, other=0).to(tl.int32)
        largest = tl.maximum(largest, tl.where(exponents == 255, 0, exponents))
        left = _weights(words, exponents, down, COLS, WARPS, ASM)
        if ARRANGED:  # padded too
            rows = tl.load(x_at + x_k)
        elif EVEN:
            rows = _activations(tl.load(x_at + x_k), ROWS)
        else:
            rows = _activations(tl.load(x_at + x_k, mask=x_k < groups * 32, other=0.0), ROWS)
        sums = tl.dot(left, rows.T, sums)
    return sums, tl.max(tl.max(largest, 1), 0)


@triton.jit
def _kernel(
    x, packed, scales, offsets, out, n_rows, n_columns, groups, experts, x_row,
    ROWS: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
    EVEN: tl.constexpr, ARRANGED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n_columns, COLS) * SPLIT
    before, tiles, total = group_tiles(offsets, n_rows, experts, across, ROWS, WIDE)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        e, row, end, column = find_tile(tile, before, tiles, offsets, n_rows, experts, ROWS, WIDE)
        n = column // SPLIT * COLS + tl.arange(0, COLS)
        m = row + tl.arange(0, ROWS)
        # past the end the last row and column once more: nothing of them is stored
        weight_row = tl.cast(e, tl.int64) * n_columns + tl.minimum(n, n_columns - 1)
        w_at = packed + weight_row[:, None] * (groups * 4)  # words of eight codes
        s_at = scales + weight_row[:, None] * (groups // 4 if EVEN else groups)
        x_at = x + tl.minimum(m, end - 1).to(tl.int64)[:, None] * x_row
        steps = tl.cdiv(groups, 4) if e < experts else 0  # rows of no expert: zeros
        share = tl.cdiv(steps, SPLIT)
        first = column % SPLIT * share
        last = tl.minimum(first + share, steps)
        # Scale bytes above 128, which hardly any weight has, call for a second pass with all of them brought down:
        # exact too, except that what lies more than 2^120 below the largest becomes zero.
        sums = tl.zeros([COLS, ROWS], tl.float32)
        down = 0
        again = 1
        while again > 0:
            sums, largest = _products(
                x_at, w_at, s_at, groups, first, last, down, ROWS, COLS, WARPS, EVEN, ARRANGED, ASM
            )
            again = tl.where((down == 0) & (largest > 128), 1, 0)
            down = tl.where(again > 0, largest - 128, down)
        sums *= ((down + 127) << 23).to(tl.float32, bitcast=True)
        sums = tl.reshape(sums, (COLS // (16 * WARPS), WARPS, 2, 8, ROWS))
        sums = tl.reshape(tl.permute(sums, (0, 2, 1, 3, 4)), (COLS, ROWS))
        at = (column % SPLIT * n_rows + m.to(tl.int64))[None, :] * n_columns + n[:, None]
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=(m < end)[None, :] & (n < n_columns)[:, None])


@triton.jit
def _arrange(x, out, n_rows, depth, x_row, x_col, ROWS: tl.constexpr):
    """Rows in the order of the product, zeros up to a whole number of steps."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (m < n_rows)[:, None]
    at = x + m.to(tl.int64)[:, None] * x_row + k[None, :] * x_col
    rows = _activations(tl.load(at, mask=inside & (k < depth)[None, :], other=0.0), ROWS)
    tl.store(out + m.to(tl.int64)[:, None] * (tl.num_programs(1) * 128) + k[None, :], rows, mask=inside)


@triton.jit
def _add(parts, out, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(SPLIT):
        total += tl.load(parts + at + i * size, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def _bucket(rows: int, experts: int) -> str:
    """By rows when they are too few to fill the device, then by rows an expert."""
    each = rows / experts
    return "one" if rows <= 2 else "few" if rows <= 16 else "some" if each <= 12 else "many" if each <= 40 else "most"


def _arranged(x: Tensor) -> Tensor:
    """[M, K up to whole steps] in the order of the product: with it the product needs no exchange at all, and runs
    beside the unpacking of the weights for the next one."""
    steps = triton.cdiv(x.shape[1], 128)
    out = torch.empty(x.shape[0], steps * 128, dtype=x.dtype, device=x.device)
    _arrange[(triton.cdiv(x.shape[0], 16), steps)](x, out, *x.shape, *x.stride(), ROWS=16, num_warps=4)
    return out


def run(x: Tensor, packed: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """See dz.ops.grouped_gemm_mxfp4.reference."""
    codes, exponents = blocks(packed, scales)
    experts, n, groups = exponents.shape
    check_offsets(offsets, experts)
    out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    cfg = TUNE.pick(x.device, _bucket(x.shape[0], experts))
    split = min(cfg["split"], triton.cdiv(groups, 4))
    target = out if split == 1 else torch.empty(split, *out.shape, dtype=torch.float32, device=x.device)
    even = groups % 4 == 0 and exponents.data_ptr() % 4 == 0
    with on(x):
        if cfg["arranged"]:
            x = _arranged(x)
        elif x.stride(1) != 1:
            x = x.contiguous()
        _kernel[(processors(x.device) * cfg["per_sm"],)](
            x, codes.view(torch.int32), exponents.view(torch.int32) if even else exponents,
            offsets.to(torch.int32).contiguous(), target, x.shape[0], n, groups, experts, x.stride(0),
            ROWS=cfg["rows"], COLS=cfg["columns"], WARPS=cfg["warps"], SPLIT=split, WIDE=power_of_two(experts + 1),
            EVEN=even, ARRANGED=bool(cfg["arranged"]), ASM=x.is_cuda, num_warps=cfg["warps"],
            num_stages=cfg["stages"], maxnreg=cfg["registers"],
        )  # fmt: skip
        if split > 1:
            _add[(triton.cdiv(out.numel(), 1024),)](target, out, out.numel(), SPLIT=split, BLOCK=1024, num_warps=4)
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
