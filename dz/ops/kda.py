"""Gated delta rule with a decay for each channel of the key (KDA)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dz.core.inventory import Match, SiteView
from dz.core.op import Case, Op
from dz.ops._delta import delta_rule
from dz.ops._delta_probe import delta_rule as delta_probe
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def log_decay(g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The log decay [..., H, K] of a gate's input g [..., H, K], a_log [H], dt_bias [H * K], in working precision.

    Without a_log g is the log decay itself. Else with `x = g + dt_bias` it is `-exp(a_log) * softplus(x)`, or, with a
    lower bound, `lower_bound * sigmoid(exp(a_log) * x)`: another function, not a clamp of the first."""
    g = wide(g)
    if a_log is None:
        return g
    x = g if dt_bias is None else g + wide(dt_bias).view(g.shape[-2:])
    rate = wide(a_log).exp()[:, None]
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_logits: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, H, V] in q's dtype, new state [N, H, K, V] fp32 or None) of q, k, g [B, T, H, K], v [B, T, H, V],
    beta [B, T, H]; fp32 inside.

    Per token: `S = exp(g)[:, None] * S; d = beta * (v - k^T S); S = S + k d^T; o = scale * q^T S`, scale K^-0.5 if
    None. The state is key-major by index; a value-major one is its transposed view. It is not changed; None is zeros.
    g is the log decay (<= 0) or, with `a_log`, the input of its gate (see `log_decay`); `beta_logits`: beta is
    sigmoid(beta); `normalize`: q and k are divided by `sqrt(sum x^2 + 1e-6)`. `cu_seqlens` [N + 1]: B = 1 holds N
    packed sequences, some possibly empty. Raises UsageError for shapes that do not fit."""
    decay = log_decay(g, a_log, dt_bias, lower_bound)
    out, new = delta_rule(
        q, k, v, decay, wide(beta).sigmoid() if beta_logits else beta,
        normalize=normalize, scale=scale, state=state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return out.to(q.dtype), new if return_state else None


def _gate(m: Maker, heads: int, dim: int, bound: float | None, shift: float = 0.0) -> dict[str, Any]:
    out = {"a_log": m.normal(heads, scale=0.5, dtype="float32"), "lower_bound": bound, "beta_logits": True}
    return {**out, "dt_bias": m.normal(heads * dim, shift=shift, dtype="float32")}


def _arguments(m: Maker, batch: int, tokens: int, heads: int, dim: int, dim_v: int = 0) -> dict[str, Any]:
    q, k, g = (m.normal(batch, tokens, heads, dim) for _ in range(3))
    return {
        "q": q,
        "k": k,
        "v": m.normal(batch, tokens, heads, dim_v or dim),
        "g": g,
        "beta": m.normal(batch, tokens, heads),
    }


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: one token, ragged chunks, both gates and none, packed with empty ones, extreme decays and none at all,
    equal keys, states, views."""
    m = Maker(dtype, device, seed)

    def state(n: int, heads: int, dim: int, dim_v: int = 0) -> Tensor:
        return m.normal(n, heads, dim, dim_v or dim, dtype="float32")

    yield Case("b3_t1_state", {**_arguments(m, 3, 1, 2, 32), **_gate(m, 2, 32, -5.0), "state": state(3, 2, 32)})
    yield Case("t70_bounded", {**_arguments(m, 1, 70, 1, 32), **_gate(m, 1, 32, -5.0)})
    softplus = {**_arguments(m, 2, 33, 1, 32, 48), **_gate(m, 1, 32, None, shift=-1.0), "state": state(2, 1, 32, 48)}
    yield Case("b2_t33_v48_softplus_state", softplus)
    packed = {**_arguments(m, 1, 70, 1, 16), **_gate(m, 1, 16, -5.0), "cu_seqlens": m.tensor([0, 1, 1, 66, 70])}
    yield Case("packed_1_0_65_4", {**packed, "state": state(4, 1, 16)})
    floor = {**_arguments(m, 1, 20, 1, 32), **_gate(m, 1, 32, -5.0), "state": state(1, 1, 32)}
    yield Case("t20_all_at_the_bound", {**floor, "g": floor["g"] + 40})
    steep = {**_arguments(m, 1, 20, 1, 32), **_gate(m, 1, 32, None), "state": state(1, 1, 32)}
    yield Case("t20_softplus_steep", {**steep, "g": steep["g"] * 8 + 20})
    same = _arguments(m, 1, 40, 1, 32)
    same |= {"k": same["k"][:, :1].expand(1, 40, 1, 32), "g": torch.zeros_like(same["g"])}
    yield Case("t40_one_key_no_decay", {**same, "beta": torch.full_like(same["beta"], 0.5)})
    yield from _others(m)


def _others(m: Maker) -> Iterator[Case]:
    fused = m.normal(2, 9, 3 * 2 * 32).view(2, 9, 6, 32)
    views = {"q": fused[:, :, :2], "k": fused[:, :, 2:4], "v": fused[:, :, 4:], "g": -m.normal(2, 9, 32, 2).abs()}
    views |= {"g": views["g"].transpose(2, 3), "beta": m.normal(2, 2, 9).transpose(1, 2).sigmoid()}
    major = m.normal(2, 2, 32, 32, dtype="float32").transpose(2, 3)
    yield Case("b2_t9_views_value_major_state", {**views, "state": major})
    plain = _arguments(m, 1, 36, 1, 128)
    plain |= {"g": -plain["g"].abs(), "beta": plain["beta"].sigmoid()}
    yield Case("t36_d128_log_decay", plain)
    raw = {k: x[:, 10:17] for k, x in plain.items()}
    raw |= {"q": raw["q"] * 0.1, "k": raw["k"] * 0.05, "scale": 0.5, "normalize": False, "return_state": False}
    yield Case("t7_d128_not_normalised", raw)
    yield Case("t0_state", {**_arguments(m, 2, 0, 1, 32), "state": m.normal(2, 1, 32, 32, dtype="float32")})


def recognise(site: SiteView) -> Match | None:
    """A function that computes the op with log decays given, proved on random inputs."""
    return delta_probe(site, "kda", reference, per_channel=True)


OP = Op(
    name="kda",
    summary="gated delta rule with a decay for each key channel",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    kind="function",
    source="arXiv:2510.26692",
)
