"""Layer normalisation over the last axis."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops._norms import layer_norm as recognise
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, eps: float = 1e-5
) -> torch.Tensor:
    """`(x - mean) * rsqrt(var + eps) * weight + bias` in fp32, rounded once: x [..., D], weight and bias [D] -> x's
    shape and dtype. The variance is the biased one."""
    full = wide(x)
    centred = full - full.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * wide(weight)
    if bias is not None:
        out = out + wide(bias)
    return out.to(x.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: data with a non-zero mean (zero mean hides an RMS norm), eps that matters, views, bias or none."""
    m = Maker(dtype, device, seed)
    w, b = m.normal(33), m.normal(33)
    yield Case("rows7_d33_mean3", {"x": m.normal(7, 33, shift=3.0), "weight": w, "bias": b, "eps": 1e-6})
    yield Case("rows1_no_bias", {"x": m.normal(1, 33, shift=1.0), "weight": w, "eps": 1e-5})
    yield Case("rows0", {"x": m.normal(0, 33), "weight": w, "bias": b, "eps": 1e-5})
    yield Case("rows4_plain", {"x": m.normal(4, 20, shift=-2.0), "eps": 1e-5})
    small = {"x": m.normal(5, 48, scale=1e-3), "weight": m.normal(48), "bias": m.normal(48), "eps": 1e-5}
    yield Case("rows5_d48_eps_dominates", small)
    yield Case("rows2_d1025_long", {"x": m.normal(2, 1025, shift=1.0), "weight": m.normal(1025), "eps": 1e-5})
    heads = {"x": m.normal(2, 5, 3, 33).transpose(1, 2), "weight": w, "bias": b, "eps": 1e-6}
    yield Case("heads2x3x5_transposed", heads)


OP = Op(
    name="layer_norm",
    summary="layer normalisation, weight and bias optional",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    source="Ba et al. 2016, arXiv:1607.06450",
)
