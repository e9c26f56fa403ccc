"""Hyper-connections: how several residual streams are read, written and mixed, from the streams themselves."""

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
    iterations: int = 20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(post [..., N] and comb [..., N, N] in fp32, collapsed [..., D] in the streams' dtype); fp32 inside.

    streams [..., N, D], fn [(2 + N) N, N D], base [(2 + N) N], scale [3]. With v the flattened streams and
    `y = fn (v * rsqrt(mean(v^2) + norm_eps))` cut into N, N and N x N: `pre = sigmoid(y0 * scale0 + base0) + eps`,
    `post = 2 sigmoid(y1 * scale1 + base1)`, `comb = softmax(y2 * scale2 + base2) + eps` divided by its column sums
    + eps, then `iterations - 1` times by its row sums + eps and its column sums + eps. `collapsed = sum_i pre_i
    streams_i`; a block's result f goes on as `post_j f + sum_i comb_ij streams_i`. Source: arXiv:2512.24880."""
    n = streams.shape[-2]
    flat = wide(streams).flatten(-2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    y, b, s = F.linear(flat, wide(fn)), wide(base), wide(scale)
    pre = torch.sigmoid(y[..., :n] * s[0] + b[:n]) + eps
    post = 2 * torch.sigmoid(y[..., n : 2 * n] * s[1] + b[n : 2 * n])
    comb = (y[..., 2 * n :] * s[2] + b[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    collapsed = (pre[..., None] * wide(streams)).sum(-2)
    return post, comb, collapsed.to(streams.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: 2 to 4 streams, one and many iterations, odd widths, one token, none, strided."""
    m = Maker(dtype, device, seed)

    def base(lead: tuple[int, ...], n: int, d: int) -> dict:
        rows = (2 + n) * n
        return {
            "streams": m.normal(*lead, n, d),
            "fn": m.normal(rows, n * d, scale=(n * d) ** -0.5, dtype="float32"),
            "base": m.normal(rows, dtype="float32"),
            "scale": m.normal(3, dtype="float32"),
        }

    yield Case("t7_n4_d33", base((7,), 4, 33))
    yield Case("b2_t5_n2", base((2, 5), 2, 16))
    yield Case("one_iteration", {**base((3,), 3, 8), "iterations": 1})
    yield Case("large_eps", {**base((4,), 4, 8), "eps": 1e-2, "norm_eps": 1e-3, "iterations": 5})
    yield Case("one_token", base((1,), 4, 64))
    yield Case("none", base((0,), 4, 8))
    strided = base((6,), 4, 16)
    yield Case("strided", {**strided, "streams": m.normal(6, 4, 32)[..., ::2]})


def recognise(site: SiteView) -> Match | None:
    """A module with the parameters of the op, proved on random inputs."""
    return _streams.hyper_connection(site, reference)


OP = Op(
    name="hyper_connection",
    summary="weights of several residual streams, doubly stochastic mixing",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    source="arXiv:2512.24880; arXiv:2409.19606",
)
