"""Attention over depth: a softmax mix of block snapshots and the running residual, each scored by a learned query."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(
    blocks: Tensor,
    prefix: Tensor,
    delta: Tensor,
    norm_weight: Tensor,
    query: Tensor,
    *,
    eps: float = 1e-5,
    out_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(mix [T, D], new prefix [T, D]) of blocks [N, T, D] (N may be 0), prefix and delta [T, D].

    `prefix' = prefix + delta`, rounded to its dtype, is the last source. Over the sources v:
    `logit = rsqrt(mean(v^2) + eps) * sum(v * norm_weight * query)` (no further scale), softmax in fp32, and the raw v
    are mixed in fp32 and rounded once; with `out_weight` [D] the mix is RMS-normalised (same eps) before that."""
    prefix = prefix + delta
    sources = wide(torch.cat((blocks, prefix[None])))
    key = wide(norm_weight) * wide(query)
    logits = (sources * key).sum(-1) * torch.rsqrt(sources.square().mean(-1) + eps)
    mix = (torch.softmax(logits, 0)[..., None] * sources).sum(0)
    if out_weight is not None:
        mix = mix * torch.rsqrt(mix.square().mean(-1, keepdim=True) + eps) * wide(out_weight)
    return mix.to(prefix.dtype), prefix


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: no blocks to eight, ragged and long rows, sharp and flat weights, an output norm, views, one, none."""
    m = Maker(dtype, device, seed)

    def case(name: str, n: int, rows: int, dim: int, *, sharp: float = 1.0, norm: bool = False) -> Case:
        args = {
            "blocks": m.normal(n, rows, dim),
            "prefix": m.normal(rows, dim, scale=2.0),
            "delta": m.normal(rows, dim, shift=0.1),
            "norm_weight": m.normal(dim, scale=0.2, shift=1.0),
            "query": m.normal(dim, scale=sharp / dim**0.5),
            "eps": 1e-5,
        }
        return Case(name, {**args, "out_weight": m.normal(dim, shift=0.5)} if norm else args)

    yield case("blocks8_rows3_d112", 8, 3, 112)
    yield case("blocks3_rows5_d33_sharp", 3, 5, 33, sharp=8.0)
    yield case("blocks1_rows2_d2049_long_norm", 1, 2, 2049, norm=True)
    yield case("blocks0_rows4_d48_norm", 0, 4, 48, norm=True)
    yield case("blocks2_rows1_d1", 2, 1, 1)
    yield case("blocks2_rows0_d32", 2, 0, 32)
    small = case("blocks2_rows3_d64_eps_dominates", 2, 3, 64)
    yield Case(small.id, {**small.args, **{k: small.args[k] * 1e-3 for k in ("blocks", "prefix", "delta")}})
    wide_rows = case("blocks4_rows6_d80", 4, 6, 80)
    views = {k: wide_rows.args[k][..., ::2] for k in ("blocks", "prefix", "delta", "norm_weight", "query")}
    yield Case("blocks4_rows6_d40_views", {**wide_rows.args, **views})
    yield Case("blocks4_t_major", {**wide_rows.args, "blocks": m.normal(6, 4, 80).transpose(0, 1)})


OP = Op(
    name="residual_mix",
    summary="softmax mix over depth of residual snapshots, with the residual's update and an output norm",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    kind="function",
    source="Attention Residuals, arXiv:2603.15031",
)
