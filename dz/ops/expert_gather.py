"""Tokens brought into the order of their experts and rounded to FP8 with one power-of-two scale a row."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops.cases import Maker
from dz.ops.precision import EXACT


def row_exponents(top: torch.Tensor) -> torch.Tensor:
    """The smallest whole e (at least -126) with `top * 2^-e <= 448`, float8_e4m3fn's largest number; 0 for 0."""
    fraction, exponent = torch.frexp(top.float())  # top = fraction * 2^exponent, 448 = 0.875 * 2^9
    e = torch.where(fraction > 0.875, exponent - 8, exponent - 9).clamp(min=-126)
    return torch.where(top == 0, 0, e)


def reference(x: torch.Tensor, rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes float8_e4m3fn [M, D], scales float32 [M]) with `x[rows[r] // k] ~ codes[r] * scales[r]`.

    x [T, D]; rows int32 [M] number choices as expert_permute does, k a token. The scale is the smallest power of two
    that brings the row within 448, so that only the rounding to e4m3 (nearest even) loses anything. A row that holds
    an infinity or NaN has scale 1 and keeps neither: its codes are NaN throughout."""
    picked = x[rows.long() // k].float()
    top = picked.abs().amax(1) if x.shape[1] else picked.new_zeros(len(rows))
    finite = torch.isfinite(top)
    e = torch.where(finite, row_exponents(torch.where(finite, top, 0.0)), 0)
    codes = torch.ldexp(picked, -e[:, None].expand(picked.shape)).to(torch.float8_e4m3fn)
    codes = codes.view(torch.uint8).masked_fill(~finite[:, None], 0x7F).view(torch.float8_e4m3fn)
    return codes, torch.ldexp(torch.ones_like(top, dtype=torch.float64), e).float()


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: rows of very different size, zeros, the boundary 448, tiny and huge numbers, long rows, strided, none."""
    m = Maker(dtype, device, seed)
    rows = m.ints(0, 14, 14, dtype="int32")
    yield Case("t7_k2_d40", {"x": m.normal(7, 40, scale=3.0), "rows": rows, "k": 2})
    edges = m.normal(6, 32)
    edges[0], edges[1, :] = 0.0, 448.0
    edges[2, 3], edges[3, 5] = 450.0, -449.0
    edges[4] = 2.0**-10
    edges[5, 0] = 3.0e38 if dtype != "float16" else 6.0e4
    yield Case("zeros_448_and_beyond", {"x": edges, "rows": m.ints(0, 6, 9, dtype="int32"), "k": 1})
    spread = m.normal(5, 64) * torch.exp2(m.ints(-12, 4, 5, 64, dtype=dtype))
    yield Case("wide_spread", {"x": spread, "rows": m.ints(0, 80, 30, dtype="int32"), "k": 16})
    yield Case("d2100_long", {"x": m.normal(3, 2100), "rows": m.ints(0, 9, 9, dtype="int32"), "k": 3})
    yield Case("strided_d1", {"x": m.normal(4, 6)[:, ::6], "rows": m.ints(0, 8, 5, dtype="int32"), "k": 2})
    yield Case("no_rows", {"x": m.normal(3, 16), "rows": m.ints(0, 3, 0, dtype="int32"), "k": 1})


OP = Op(
    name="expert_gather",
    summary="rows of tokens by expert, in FP8 with a power-of-two scale each",
    reference=reference,
    tolerance={"bfloat16": EXACT, "float16": EXACT},
    inputs=inputs,
    kind="function",
    source="OCP 8-bit Floating Point (OFP8) 1.0",
)
