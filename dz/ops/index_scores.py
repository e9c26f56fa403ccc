"""Scores of a lightning indexer: how much each query wants to see each key, before the selection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op, Tolerance
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide_dtype


def reference(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, *, k_scale: Tensor | None = None
) -> Tensor:
    """[S, T] fp32: `k_scale[t] * sum_h weights[s, h] * relu(q[s, h] . k[t])`, -inf outside of the query's window.

    q [S, H, D] and k [T, D] of one dtype (fp32, fp16, bf16 or e4m3); weights [S, H] fp32 with the softmax scale and,
    for e4m3, the scales of q folded in; k_scale [T] fp32 for keys of scaled e4m3 (a scale is positive: it may
    leave the relu). starts, ends [S] int32: query s sees the keys from starts[s] to before ends[s]. Products and sums
    in fp32 (float64 if the weights are)."""
    work = wide_dtype(weights.dtype)
    products = torch.einsum("shd,td->sht", q.to(work), k.to(work)).relu()
    scores = torch.einsum("sh,sht->st", weights.to(work), products)
    if k_scale is not None:
        scores = scores * k_scale.to(work)
    at = torch.arange(k.shape[0], device=k.device)
    seen = (at >= starts[:, None]) & (at < ends[:, None])
    return scores.masked_fill(~seen, float("-inf"))


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Causal and ragged windows, empty ones, few and many heads, keys with scales, one query, none, views."""
    m = Maker(dtype, device, seed)

    def case(name: str, queries: int, keys: int, heads: int, dim: int, windows: list[tuple[int, int]]) -> Case:
        args = {
            "q": m.normal(queries, heads, dim),
            "k": m.normal(keys, dim),
            # of either sign; scores of order one
            "weights": m.normal(queries, heads, scale=(heads * dim) ** -0.5, dtype="float32"),
            "starts": m.tensor([a for a, _ in windows], "int32"),
            "ends": m.tensor([b for _, b in windows], "int32"),
        }
        return Case(name, args)

    yield case("s5_t70_h4_d32_causal", 5, 70, 4, 32, [(0, 66 + i) for i in range(5)])
    ragged = case("s3_t200_h20_d64_windows", 3, 200, 20, 64, [(17, 140), (0, 0), (129, 200)])
    yield ragged
    scale = m.normal(200, scale=0.2, dtype="float32").abs() + 0.5
    yield Case("s3_t200_h20_scaled_keys", {**ragged.args, "k_scale": scale})
    yield case("s1_t300_h64_d128", 1, 300, 64, 128, [(0, 300)])
    yield case("s9_t1_h1_d16", 9, 1, 1, 16, [(0, i % 2) for i in range(9)])
    yield case("s0_t32_h4_d16", 0, 32, 4, 16, [])
    wide = case("s4_t90_h6_d64_views", 4, 90, 6, 64, [(0, 90)] * 4)
    views = {"q": wide.args["q"][:, ::2, 32:], "k": wide.args["k"][::3, :32], "weights": wide.args["weights"][:, ::2]}
    yield Case(wide.id, {**wide.args, **views, "ends": m.tensor([30, 29, 1, 30], "int32")})


OP = Op(
    name="index_scores",
    summary="scores of an index: weighted sum over heads of relu(q.k), windowed",
    reference=reference,
    tolerance={
        **REDUCTION,
        "float16": REDUCTION["float32"],  # products of 11 or 8 bits are exact in fp32, and so are the sums nearly
        "bfloat16": REDUCTION["float32"],
        "float8_e4m3fn": Tolerance(2e-3, 2**-10),  # FP8 matrix units keep about 14 bits of a sum
    },
    inputs=inputs,
    kind="function",
    source="lightning indexer of sparse latent attention; scale algebra: relu(c x) = c relu(x) for c > 0",
)
