"""RMS normalisation over the last axis, in the forms that published models use."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops._norms import rms_norm as recognise
from dz.ops.cases import Maker
from dz.ops.precision import ELEMENTWISE, wide


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_first: bool = True,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`x * rsqrt(mean(x^2) + eps) * (offset + weight)`: x [..., D], weight [D] or None -> [..., D].

    Statistics are fp32. `cast_first`: the normalised value is rounded to x's dtype and then multiplied by the weight
    (the result has their promoted dtype); otherwise the product is taken in fp32 and rounded once to x's dtype.
    `offset` is 1 for models that store weight - 1. With `residual` (x's shape) the input is `h = x + residual`, rounded
    to x's dtype, and (normalised, h) is returned."""
    h = x if residual is None else x + residual
    full = wide(h)
    normed = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        out = normed.to(h.dtype)
    elif cast_first:
        out = normed.to(h.dtype) * (weight + offset if offset else weight)
    else:
        out = (normed * (wide(weight) + offset)).to(h.dtype)
    return out if residual is None else (out, h)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: ragged and long rows, one, none, both offsets and cast orders, eps that matters, views, residual."""
    m = Maker(dtype, device, seed)
    yield Case("rows7_d33", {"x": m.normal(7, 33), "weight": m.normal(33), "eps": 1e-6})
    yield Case("rows1_d1", {"x": m.normal(1, 1), "weight": m.normal(1), "eps": 1e-6})
    yield Case("rows0_d33", {"x": m.normal(0, 33), "weight": m.normal(33), "eps": 1e-6})
    yield Case("rows3_d2049_long", {"x": m.normal(3, 2049), "weight": m.normal(2049), "eps": 1e-5})
    small = {"x": m.normal(5, 48, scale=1e-3), "weight": m.normal(48), "eps": 1e-5}
    yield Case("rows5_d48_eps_dominates", small)
    yield Case("rows2_d40_zero_row", {"x": m.normal(2, 40) * m.tensor([[0], [1]]), "weight": m.normal(40), "eps": 1e-5})
    shifted = {"x": m.normal(6, 72), "weight": m.normal(72, scale=0.3), "offset": 1.0, "cast_first": False}
    yield Case("rows6_d72_offset_fp32_product", {**shifted, "eps": 1e-6})
    yield Case(
        "rows4_d96_fp32_product", {"x": m.normal(4, 96), "weight": m.normal(96), "cast_first": False, "eps": 1e-6}
    )
    yield Case("rows4_d20_no_weight", {"x": m.normal(4, 20, shift=0.5), "eps": 1e-5})
    heads = m.normal(2, 5, 3, 64).transpose(1, 2)
    yield Case("heads2x3x5_d64_transposed", {"x": heads, "weight": m.normal(64), "eps": 1e-6})
    yield Case("rows5_d30_of_61_columns", {"x": m.normal(5, 61)[:, 1::2], "weight": m.normal(60)[::2], "eps": 1e-6})
    both = {"x": m.normal(2, 3, 50), "weight": m.normal(50, scale=0.3), "residual": m.normal(2, 3, 50, shift=1.0)}
    yield Case("batch2x3_d50_residual_offset", {**both, "eps": 1e-5, "offset": 1.0, "cast_first": False})
    mixed = {"x": m.normal(3, 34), "weight": m.normal(34, dtype="float32"), "eps": 1e-6}
    yield Case("rows3_d34_fp32_weight_fp32_product", {**mixed, "cast_first": False})
    yield Case("rows3_d34_fp32_weight_promotes", mixed)
    offset = {"x": m.normal(3, 34), "weight": m.normal(34, scale=0.3), "offset": 1.0, "eps": 1e-6}
    yield Case("rows3_d34_offset_cast_first_residual", {**offset, "residual": m.normal(3, 68)[:, ::2]})


OP = Op(
    name="rms_norm",
    summary="RMS normalisation, with offset, cast order and fused residual",
    reference=reference,
    tolerance=ELEMENTWISE,
    inputs=inputs,
    recognise=recognise,
    source="Zhang & Sennrich 2019, arXiv:1910.07467",
)
