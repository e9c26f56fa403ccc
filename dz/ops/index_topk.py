"""Exact selection of the k best positions of each row: the second half of a lightning indexer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op, Tolerance


def order_key(x: Tensor) -> Tensor:
    """int64 keys in [0, 2^32) that sort as fp32 does: -0.0 equals 0.0, every NaN is one value above +inf."""
    bits = (x.float() + 0.0).view(torch.int32).to(torch.int64)
    bits = torch.where(x.isnan(), 0x7FC00000, bits)
    return torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits + 0x80000000)


def reference(scores: Tensor, starts: Tensor, ends: Tensor, k: int, *, ordered: bool = True) -> Tensor:
    """The positions of the k largest of `scores[i, starts[i]:ends[i]]`, ascending, then -1. [R, k] int32.

    Without `ordered` a kernel may give the positions of a row in any order (-1 still comes last).

    scores [R, T] fp32; starts, ends [R] int32. Equal scores: the lowest position wins. NaN ranks above every number (as
    in `torch.topk`), so that a broken score is seen downstream. A row shorter than k yields all its positions."""
    rows, width = scores.shape
    at = torch.arange(width, device=scores.device)
    valid = (at >= starts[:, None]) & (at < ends[:, None])
    keys = torch.where(valid, order_key(scores), -1)
    take = min(k, width)
    best = torch.sort(keys, dim=1, descending=True, stable=True)
    chosen = torch.where(best.values[:, :take] >= 0, best.indices[:, :take], width).sort(dim=1).values
    out = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    out[:, :take] = torch.where(chosen < width, chosen, -1).to(torch.int32)
    return out


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Random, tied, mostly zero, ascending, descending and non-finite rows; ragged windows; rows shorter than k."""
    gen = torch.Generator("cpu").manual_seed(seed)

    def case(name: str, scores: Tensor, k: int, starts: list[int], ends: list[int]) -> Case:
        window = [torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, ends)]
        scores = scores.to(device)
        return Case(name, {"scores": scores, "starts": window[0], "ends": window[1], "k": k})

    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=gen)

    yield case("rows5_t400_ragged", normal(5, 400), 13, [0, 3, 100, 0, 17], [400, 388, 109, 0, 399])
    tied = torch.randint(-2, 3, (3, 320), generator=gen).float()
    yield case("rows3_t320_tied", tied, 16, [0, 1, 2], [320, 320, 319])
    zeros = torch.relu(normal(3, 512) - 2.2) * torch.tensor([1.0, -1.0, 1.0])[:, None]
    yield case("rows3_t512_mostly_zero", zeros, 32, [0, 0, 5], [512, 512, 500])
    ramp = torch.arange(1100).float()
    many = torch.relu(normal(2, 1100) - 2.2)
    yield case("rows2_t1100_mostly_zero_long", many, 24, [0, 3], [1100, 1090])
    yield case("rows2_t1100_sorted", torch.stack([ramp, -ramp]), 10, [0, 0], [1100, 1100])
    odd = normal(3, 256)
    odd[0, 7::9], odd[0, 3::11] = float("inf"), float("nan")
    odd[1, ::2] = float("-inf")
    odd[2] = float("nan")
    yield case("rows3_t256_not_finite", odd, 40, [0, 0, 0], [256, 256, 256])
    yield case("rows2_t33_k_exceeds_row", normal(2, 33), 64, [0, 4], [33, 30])
    yield case("rows3_t300_strided", normal(3, 640)[:, 17:317], 8, [0, 0, 9], [300, 299, 300])
    yield case("rows1_t600_one", normal(1, 600), 1, [2], [600])
    yield case("rows0_t64_empty", normal(0, 64), 4, [], [])


OP = Op(
    name="index_topk",
    summary="positions of the k largest scores of each row, exact, lowest position on ties",
    reference=reference,
    inputs=inputs,
    tolerance={"float32": Tolerance(0.0, 0.0)},
    kind="function",
    source="radix selection on the order-preserving integer of fp32; output ascending by position",
)
