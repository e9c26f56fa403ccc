"""The head: logits from hidden states, with scale and softcap."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops._dense import lm_head as recognise
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """`cap(scale * (x @ weight.T + bias))`: x [..., D], weight [V, D], bias [V] -> logits [..., V] in x's dtype, where
    `cap(l) = softcap * tanh(l / softcap)`; scale and cap act in fp32 on the rounded projection, as upstream's do."""
    logits = torch.nn.functional.linear(x, weight, bias)
    if scale == 1.0 and softcap is None:
        return logits
    full = wide(logits) * scale
    if softcap is not None:
        full = softcap * torch.tanh(full / softcap)
    return full.to(x.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: ragged vocabulary, one row, none, bias, scale and a cap that binds, together and apart, strided rows."""
    m = Maker(dtype, device, seed)
    w = m.normal(101, 24, scale=24**-0.5)
    yield Case("rows5_v101", {"x": m.normal(5, 24), "weight": w})
    yield Case("rows1_bias", {"x": m.normal(1, 24), "weight": w, "bias": m.normal(101)})
    yield Case("rows0", {"x": m.normal(0, 24), "weight": w, "softcap": 30.0})
    yield Case("softcap2", {"x": m.normal(2, 3, 24, scale=3.0), "weight": w, "softcap": 2.0})
    every = {"x": m.normal(6, 2, 24).transpose(0, 1), "weight": w, "bias": m.normal(101)}
    yield Case("strided_bias_scale_softcap", {**every, "scale": 0.25, "softcap": 1.5})
    yield Case("v1030_long", {"x": m.normal(3, 24), "weight": m.normal(1030, 24, scale=24**-0.5), "scale": 2.0})


OP = Op(
    name="lm_head",
    summary="logits, with scale and softcap",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
)
