"""The weighted sum of what a token's experts gave, from rows sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops import expert_permute
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(y: torch.Tensor, places: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, D] in y's dtype: `out[t] = sum_k weight[t, k] * y[places[t, k]]`, in fp32 and in the order of k.

    y [M, D]; places int32 [T, K] as expert_permute gives them: -1 is a choice of another rank and adds nothing; weight
    float32 [T, K]."""
    out = torch.zeros(places.shape[0], y.shape[1], dtype=wide(y).dtype, device=y.device)
    for k in range(places.shape[1]):
        here = places[:, k] >= 0
        rows = wide(y[places[here, k].long()]) * wide(weight[here, k])[:, None]
        out[here] += rows
    return out.to(y.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: all here, some and all of other ranks, one token, long rows, strided, none."""
    m = Maker(dtype, device, seed)

    def case(t: int, k: int, experts: int, dim: int, low: int = 0, high: int | None = None) -> dict:
        index = m.ints(low, high or experts, t, k)
        places = expert_permute.reference(index, experts)[1]
        return {
            "y": m.normal(t * k, dim),
            "places": places,
            "weight": m.normal(t, k, scale=0.1, shift=0.5, dtype="float32"),
        }

    yield Case("t7_k2_d40", case(7, 2, 5, 40))
    yield Case("other_ranks", case(33, 4, 4, 72, -3, 9))
    yield Case("none_here", case(5, 3, 2, 16, 8, 20))
    yield Case("one_token_k16_d1", case(1, 16, 56, 1))
    yield Case("d2100_long", case(3, 6, 8, 2100))
    strided = case(6, 4, 5, 48)
    strided["y"] = m.normal(24, 96)[:, ::2]
    strided["weight"] = m.normal(4, 6, dtype="float32").T
    yield Case("strided", strided)
    yield Case("no_tokens", case(0, 2, 3, 8))


OP = Op(
    name="expert_combine",
    summary="weighted sum over the experts of each token",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    kind="function",
    source="Shazeer et al. 2017, arXiv:1701.06538",
)
