"""One step of a KDA layer between its projections: conv, gate, l2 norm, delta rule, gated output norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op
from dz.ops._delta import delta_rule
from dz.ops.cases import Maker
from dz.ops.causal_conv import reference as causal_conv
from dz.ops.kda import log_decay
from dz.ops.precision import REDUCTION, wide


def reference(
    x: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor | None,
    state: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    *,
    lower_bound: float | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o [B, H, V], new conv state [B, C, L], new state [B, H, K, V]) of one token for each of B sequences.

    x [B, C], C = 2 H K + H V: the projections of queries, keys and values; they are convolved with conv_weight [C, W]
    after the last inputs conv_state [B, C, L], L >= W - 1, then SiLU. g [B, H, K] is the input of the decay's gate (see
    dz.ops.kda.log_decay), beta [B, H] logits, state fp32. The output is RMS-normalised over V (eps), times norm_weight
    [V], times sigmoid(gate [B, H, V]). fp32 inside, x's dtype outside; nothing is changed."""
    batch, heads, dim = g.shape
    dim_v, dtype = gate.shape[-1], x.dtype
    mixed, new_conv = causal_conv(wide(x)[..., None], conv_weight, state=conv_state, activation="silu")
    q, k, v = mixed[..., 0].split((heads * dim, heads * dim, heads * dim_v), -1)
    q, k = (t.view(batch, 1, heads, dim) for t in (q, k))
    decay = log_decay(g, a_log, dt_bias, lower_bound)
    out, new = delta_rule(
        q, k, v.view(batch, 1, heads, dim_v), decay[:, None], wide(beta).sigmoid()[:, None],
        normalize=True, scale=None, state=state, cu_seqlens=None,
    )  # fmt: skip
    out = out[:, 0]
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * wide(norm_weight) * wide(gate).sigmoid()
    return out.to(dtype), new_conv.to(conv_state.dtype), new


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: several sequences, both gates, K and V that differ and are no powers of two, wider conv states, a
    value-major state, views, no sequence."""
    m = Maker(dtype, device, seed)

    def case(
        name: str, batch: int, heads: int, dim: int, dim_v: int, *, bound: float | None = -5.0, kept: int = 3
    ) -> Case:
        channels = heads * (2 * dim + dim_v)
        return Case(name, {
            "x": m.normal(batch, channels), "conv_weight": m.normal(channels, 4, scale=0.5),
            "conv_state": m.normal(batch, channels, kept), "g": m.normal(batch, heads, dim),
            "beta": m.normal(batch, heads), "a_log": m.normal(heads, scale=0.5, dtype="float32"),
            "dt_bias": m.normal(heads * dim, dtype="float32"),
            "state": m.normal(batch, heads, dim, dim_v, dtype="float32"), "gate": m.normal(batch, heads, dim_v),
            "norm_weight": m.normal(dim_v, shift=1.0, scale=0.2), "lower_bound": bound, "eps": 1e-5,
        })  # fmt: skip

    yield case("b3_h2_d32", 3, 2, 32, 32)
    yield case("b2_h1_d128_softplus", 2, 1, 128, 128, bound=None)
    yield case("b2_h2_k24_v40_state4", 2, 2, 24, 40, kept=4)
    views = case("b2_h2_value_major_views", 2, 2, 32, 16)
    wider = m.normal(2, 3 * 160)
    views.args.update(x=wider[:, 160:320], state=m.normal(2, 2, 16, 32, dtype="float32").transpose(2, 3), dt_bias=None)
    views.args["conv_state"] = m.normal(2, 3, 160).transpose(1, 2)
    yield views
    yield case("b0", 0, 2, 32, 32)


OP = Op(
    name="kda_decode",
    summary="one step of a KDA layer: short conv, gate, l2 norm, delta rule, gated output norm",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    kind="function",
    source="arXiv:2510.26692",
    phases=("decode",),
)
