"""Gated delta rule with one decay for each head (gated delta net)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dz.core.inventory import Match, SiteView
from dz.core.op import Case, Op
from dz.ops._delta import delta_rule
from dz.ops._delta_probe import delta_rule as delta_probe
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    normalize: bool = True,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, H, V] in q's dtype, new state [N, H, K, V] fp32 or None) of q and k [B, T, Hk, K], v [B, T, H, V], log
    decays g (<= 0) and beta [B, T, H]; each query and key head serves H / Hk consecutive value heads; fp32 inside.

    Per token: `S = exp(g) S; d = beta * (v - k^T S); S = S + k d^T; o = scale * q^T S`, scale K^-0.5 if None. The rest
    as dz.ops.kda.reference: `normalize`, `state` (not changed, zeros if None), `cu_seqlens`."""
    out, new = delta_rule(
        q, k, v, wide(g)[..., None], beta,
        normalize=normalize, scale=scale, state=state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return out.to(q.dtype), new if return_state else None


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: one token, ragged chunks, grouped heads, packed with empty ones, no decay and steep ones, views."""
    m = Maker(dtype, device, seed)

    def case(name: str, batch: int, tokens: int, key_heads: int, heads: int, dim: int, dim_v: int, **more: Any) -> Case:
        n = more.pop("sequences", batch)
        args = {
            "q": m.normal(batch, tokens, key_heads, dim),
            "k": m.normal(batch, tokens, key_heads, dim),
            "v": m.normal(batch, tokens, heads, dim_v),
            "g": -m.normal(batch, tokens, heads, dtype="float32").abs() * more.pop("steep", 0.5),
            "beta": m.normal(batch, tokens, heads).sigmoid(),
        }
        if more.pop("held", False):
            args["state"] = m.normal(n, heads, dim, dim_v, dtype="float32")
        return Case(name, {**args, **more})

    yield case("b2_t1_grouped_state", 2, 1, 1, 2, 32, 32, held=True)
    yield case("t70_k32_v48", 1, 70, 1, 1, 32, 48)
    packed = {"cu_seqlens": m.tensor([0, 1, 1, 66, 70]), "sequences": 4}
    yield case("packed_1_0_65_4", 1, 70, 1, 1, 16, 16, held=True, **packed)
    yield case("t20_steep", 1, 20, 1, 1, 32, 32, held=True, steep=30.0)
    raw = case("t20_no_decay_not_normalised", 1, 20, 1, 1, 16, 16, steep=0.0, scale=0.3, normalize=False, held=True)
    yield Case(raw.id, {**raw.args, "k": raw.args["k"] * 0.2})
    wider = case("t20_views", 1, 20, 1, 2, 32, 32)
    every = {x: wider.args[x][:, ::2] for x in ("q", "k", "v", "g", "beta")}
    yield Case("t10_views_grouped_no_state_wanted", {**wider.args, **every, "return_state": False})
    yield case("t36_d128", 1, 36, 1, 1, 128, 128)
    yield case("t0_state", 2, 0, 1, 1, 32, 32, held=True)


def recognise(site: SiteView) -> Match | None:
    """A function that computes the op, proved on random inputs."""
    return delta_probe(site, "gated_delta_rule", reference, per_channel=False)


OP = Op(
    name="gated_delta_rule",
    summary="gated delta rule with one decay for each head",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    kind="function",
    source="Gated Delta Networks, arXiv:2412.06464",
)
