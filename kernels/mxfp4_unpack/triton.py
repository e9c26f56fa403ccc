"""MXFP4 unpacked by arithmetic on bits: no table, exact in float32 and bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on
from dz.kernels.common.refuse import dtypes, one_device, support, unknown
from dz.ops.mxfp4_unpack import BLOCK, blocks

OUTPUTS = ("bfloat16", "float32")
GROUPS = 128  # blocks of 32 values for a program of one warp: 2 KB in, 8 KB out in bfloat16 (2.9 TB/s on an H200)


@triton.jit
def _value(code, scale):
    """fp32 `e2m1[code] * scale`: twice the magnitude is a whole number; the sign goes in as a bit (0 - 0 is +0)."""
    exponent, half = (code >> 1) & 3, code & 1
    twice = tl.where(exponent == 0, half, (2 + half) << tl.maximum(exponent - 1, 0))
    bits = (twice.to(tl.float32) * 0.5 * scale).to(tl.int32, bitcast=True)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _kernel(packed, scales, out, n_groups, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS).to(tl.int64)
    inside = group < n_groups
    byte = tl.load(scales + group, mask=inside, other=127).to(tl.int32)
    # 2^(byte - 127): byte 0 is the subnormal 2^-127, byte 255 is NaN (its plain bits would be infinity)
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    scale = bits.to(tl.float32, bitcast=True)[:, None]
    column = tl.arange(0, 16)[None, :]
    code = tl.load(packed + group[:, None] * 16 + column, mask=inside[:, None], other=0).to(tl.int32)
    both = tl.interleave(_value(code & 15, scale), _value(code >> 4, scale))
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + at, both.to(out.dtype.element_ty), mask=inside[:, None])


def run(packed: Tensor, scales: Tensor, *, dtype: str = "bfloat16") -> Tensor:
    """See dz.ops.mxfp4_unpack.reference."""
    codes, exps = (t.contiguous() for t in blocks(packed, scales))
    out = torch.empty((*exps.shape[:-1], exps.shape[-1] * BLOCK), dtype=getattr(torch, dtype), device=packed.device)
    if out.numel():
        with on(packed):
            grid = (triton.cdiv(exps.numel(), GROUPS),)
            _kernel[grid](codes, exps, out, exps.numel(), GROUPS=GROUPS, num_warps=1)
    return out


def supports(args: Mapping[str, Any]) -> Support:
    """Both layouts of the op, to bfloat16 or float32."""
    dtype = args.get("dtype", "bfloat16")
    return support(
        unknown(args, ("packed", "scales", "dtype")),
        dtypes(args, ("packed",), ("uint8", "int8")),
        dtypes(args, ("scales",), ("uint8", "float8_e8m0fnu")),
        one_device(args),
        f"unpacks to {' and '.join(OUTPUTS)}, not {dtype}" if dtype not in OUTPUTS else "",
    )


KERNEL = Kernel(
    op="mxfp4_unpack",
    technique="triton",
    summary="bit arithmetic, both layouts, one pass",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=OUTPUTS),
    supports=supports,
)
