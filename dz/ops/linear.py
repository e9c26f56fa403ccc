"""Linear projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops._dense import linear as recognise
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`: x [..., K], weight [N, K], bias [N] -> [..., N] in x's dtype, accumulated in fp32."""
    return torch.nn.functional.linear(x, weight, bias)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: non-square, ragged sizes, one row, none, bias, strided views, K of several blocks."""
    m = Maker(dtype, device, seed)
    w = m.normal(17, 33, scale=33**-0.5)
    yield Case("rows7_k33_n17", {"x": m.normal(7, 33), "weight": w})
    yield Case("rows1_k33_n17_bias", {"x": m.normal(1, 33), "weight": w, "bias": m.normal(17)})
    yield Case("rows0_bias", {"x": m.normal(0, 33), "weight": w, "bias": m.normal(17)})
    strided = {
        "x": m.normal(6, 3, 66).transpose(0, 1)[..., ::2],
        "weight": w.t().contiguous().t(),
        "bias": m.normal(17),
    }
    yield Case("batch3x6_strided_bias", strided)
    yield Case("rows65_k520_n130", {"x": m.normal(65, 520), "weight": m.normal(130, 520, scale=520**-0.5)})
    yield Case("k1_n1", {"x": m.normal(3, 1), "weight": m.normal(1, 1), "bias": m.normal(1)})


OP = Op(
    name="linear",
    summary="linear projection",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
)
