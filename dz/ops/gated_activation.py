"""The product of an activated gate and an up projection: SwiGLU, GeGLU, clamped SwiGLU, SiTU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops._gates import gated_activation as recognise
from dz.ops.activations import activation as activation_of
from dz.ops.cases import Maker
from dz.ops.precision import ELEMENTWISE, REDUCTION, wide


def split(gate: torch.Tensor, up: torch.Tensor | None, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) as two views [..., I]. Without `up`, `gate` [..., 2I] holds both: as halves, or alternating."""
    if up is not None:
        if interleaved:
            raise UsageError(
                "interleaved gate and up given as two tensors",
                "they are separate already",
                "drop interleaved",
                code="bad_argument",
            )
        return gate, up
    if gate.shape[-1] % 2:
        raise UsageError(
            f"gate and up in {gate.shape[-1]} columns",
            "they need an even number",
            "check the projection's shape",
            code="bad_shape",
        )
    if interleaved:
        return gate[..., 0::2], gate[..., 1::2]
    first, second = gate.chunk(2, -1)
    return first, second


def reference(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    shift: float = 0.0,
    gate_cap: float = 4.0,
    up_cap: float = 25.0,
) -> torch.Tensor:
    """`activation(gate) * (up + shift)` in fp32, rounded once to gate's dtype: [..., I].

    `limit` first clamps gate from above and up on both sides. `alpha` is the slope inside SiLU:
    `g * sigmoid(alpha * g)`. Clamped SwiGLU is silu with alpha 1.702, limit 7 and shift 1. "situ" is
    `gate_cap * tanh(g / gate_cap) * sigmoid(g) * up_cap * tanh(u / up_cap)`. Raises UsageError for an unknown
    activation and for an alpha that the activation has not."""
    g, u = (wide(t) for t in split(gate, up, interleaved))
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if alpha != 1.0 and activation != "silu":
        raise UsageError(f"alpha {alpha} for {activation}", "only silu has a slope", "drop alpha", code="bad_argument")
    if activation == "situ":
        g, u = gate_cap * torch.tanh(g / gate_cap) * torch.sigmoid(g), up_cap * torch.tanh(u / up_cap)
    elif activation == "silu":
        g = g * torch.sigmoid(alpha * g)
    else:
        g = activation_of(activation)(g)
    return (g * (u + shift)).to(gate.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: every activation, both layouts, clamps that bind on both sides, views, ragged, one, none, long."""
    m = Maker(dtype, device, seed)
    for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "situ"):
        pair = {"gate": m.normal(7, 33, scale=3.0), "up": m.normal(7, 33, scale=3.0)}
        yield Case(f"{name}_rows7_i33", {**pair, "activation": name})
    clamped = {"activation": "silu", "alpha": 1.702, "limit": 7.0, "shift": 1.0}
    yield Case("clamped_interleaved_rows5_i17", {"gate": m.normal(5, 34, scale=6.0), "interleaved": True, **clamped})
    yield Case("clamped_split_rows5_i17", {"gate": m.normal(5, 34, scale=6.0), **clamped})
    yield Case(
        "limit_only_rows3_i40", {"gate": m.normal(3, 40, scale=9.0), "up": m.normal(3, 40, scale=9.0), "limit": 10.0}
    )
    situ = {"gate": m.normal(4, 2, 26, scale=8.0), "activation": "situ", "gate_cap": 3.0, "up_cap": 11.0}
    yield Case("situ_caps_batch4x2", {**situ, "interleaved": True})
    yield Case("views_of_one_projection", {"gate": (p := m.normal(6, 130))[:, :65], "up": p[:, 65:]})
    yield Case("columns_strided_3d", {"gate": m.normal(2, 3, 62)[..., ::2], "up": m.normal(3, 2, 31).transpose(0, 1)})
    yield Case("rows1_i1", {"gate": m.normal(1, 1), "up": m.normal(1, 1)})
    yield Case("rows0", {"gate": m.normal(0, 12), "up": m.normal(0, 12)})
    yield Case("i0", {"gate": m.normal(3, 0), "up": m.normal(3, 0)})
    yield Case("rows2_i3001_long", {"gate": m.normal(2, 6002)})


OP = Op(
    name="gated_activation",
    summary="activated gate times up projection, clamped and capped forms",
    reference=reference,
    # in fp32 a tanh or 1 + erf made of exp cancels near zero: an absolute error of some 1e-6 under a cap of 25
    tolerance={**ELEMENTWISE, "float32": REDUCTION["float32"]},
    inputs=inputs,
    recognise=recognise,
    kind="function",
    source="Shazeer 2020, arXiv:2002.05202",
)
