"""The end of hyper-connections: several residual streams into one, weighted by the streams themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from dz.core.inventory import Match, SiteView
from dz.core.op import Case, Op
from dz.ops import _streams
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float = 1e-6,
    eps: float = 1e-6,
) -> torch.Tensor:
    """[..., D] in the streams' dtype: `sum_i pre_i streams_i` with `pre = sigmoid(y * scale + base) + eps` and
    `y = fn (v * rsqrt(mean(v^2) + norm_eps))` of the flattened streams v, in fp32.

    streams [..., N, D], fn [N, N D], base [N], scale [1]. Source: arXiv:2512.24880."""
    flat = wide(streams).flatten(-2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(F.linear(flat, wide(fn)) * wide(scale) + wide(base)) + eps
    return (pre[..., None] * wide(streams)).sum(-2).to(streams.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: 2 to 4 streams, odd widths, one token, none, strided."""
    m = Maker(dtype, device, seed)

    def base(lead: tuple[int, ...], n: int, d: int) -> dict:
        return {
            "streams": m.normal(*lead, n, d),
            "fn": m.normal(n, n * d, scale=(n * d) ** -0.5, dtype="float32"),
            "base": m.normal(n, dtype="float32"),
            "scale": m.normal(1, dtype="float32"),
        }

    yield Case("t7_n4_d33", base((7,), 4, 33))
    yield Case("b2_t5_n2", base((2, 5), 2, 16))
    yield Case("large_eps", {**base((4,), 3, 8), "eps": 1e-2, "norm_eps": 1e-3})
    yield Case("one_token", base((1,), 4, 64))
    yield Case("none", base((0,), 4, 8))
    yield Case("strided", {**base((6,), 4, 16), "streams": m.normal(6, 4, 32)[..., ::2]})


def recognise(site: SiteView) -> Match | None:
    """A module with the parameters of the op, proved on random inputs."""
    return _streams.hyper_collapse(site, reference)


OP = Op(
    name="hyper_collapse",
    summary="several residual streams into one",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    source="arXiv:2512.24880",
)
