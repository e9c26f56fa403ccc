"""Absorbed latent attention of each query over the cache rows that an index chose for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op
from dz.ops.cases import Maker
from dz.ops.latent_fp8 import pack, unpack
from dz.ops.precision import REDUCTION, wide, wide_dtype


def reference(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, value_dim: int = 512, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out [S, H, R] in q's dtype, lse [S, H] fp32) of q [S, H, D] over rows of kv; R is `value_dim`.

    kv is [T, D] in q's dtype, or uint8 rows of dz.ops.latent_fp8; its first R channels are the values too. A paged
    cache is its view [blocks * page, ...], and an index then block * page + offset. indices [S, K] int32: an entry
    below 0 or from T on is none, one named twice counts twice. `scale` is that of the head before absorption.
    `sink` [H] fp32 is one more logit whose value is nothing. lse is the natural log of the sum of exponentials without
    the sink; a query without rows gives zeros and -inf."""
    rows = unpack(kv, value_dim).to(wide_dtype(q.dtype)) if kv.dtype == torch.uint8 else wide(kv)
    seen = (indices >= 0) & (indices < rows.shape[0])
    at = torch.where(seen, indices, 0).long()
    keys = rows[at] if rows.shape[0] else rows.new_zeros(*indices.shape, rows.shape[1])
    keys = keys.masked_fill(~seen[..., None], 0.0)  # rows that nobody names may hold NaN
    logits = torch.einsum("shd,skd->shk", wide(q), keys) * scale
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    lse = torch.logsumexp(logits, -1) if indices.shape[1] else logits.new_full(logits.shape[:2], float("-inf"))
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))
    weights = torch.exp(logits - torch.where(total.isneginf(), 0.0, total)[..., None])
    out = torch.einsum("shk,skd->shd", weights, keys[..., :value_dim])
    return out.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: 16 to 128 heads and a dozen, both caches, sinks, padding, rows named twice or out of range, queries
    without rows, fewer and many more choices than a tile, one query, none, views, poisoned unused rows."""
    m = Maker(dtype, device, seed)

    def case(name: str, queries: int, heads: int, rows: int, picks: int, rank: int, rope: int, packed: bool) -> Case:
        kv = m.normal(rows, rank + rope)
        args = {
            "q": m.normal(queries, heads, rank + rope),
            "kv": pack(kv[:, :rank], kv[:, rank:]) if packed else kv,
            "indices": m.ints(-1, rows, queries, picks, dtype="int32"),
            "scale": 1.5 * (rank + rope) ** -0.5,
            "value_dim": rank,
        }
        return Case(name, args)

    sink = {"sink": m.normal(16, dtype="float32")}
    yield case("s5_h16_t100_k70", 5, 16, 100, 70, 128, 64, False)
    yield case("s5_h16_t100_k70_packed", 5, 16, 100, 70, 128, 64, True)
    for packed in (False, True):
        some = case(f"s3_h16_t50_k130_sink_{packed}", 3, 16, 50, 130, 128, 32, packed)
        some.args["indices"][1] = -1
        some.args["indices"][2, 5:] = -1
        yield Case(some.id, {**some.args, **sink})
        far = case(f"s2_h12_t40_k33_far_{packed}", 2, 12, 40, 33, 128, 16, packed)
        far.args["indices"][:, ::3] = 40
        far.args["indices"][0, 1:9] = 7
        yield far
    yield case("s2_h128_t300_k200_r256", 2, 128, 300, 200, 256, 64, False)
    yield case("s1_h64_t600_k513_r512_packed", 1, 64, 600, 513, 512, 64, True)
    full = case("s3_h128_t700_k300_r512", 3, 128, 700, 300, 512, 64, False)
    full.args["indices"][1, 70:] = -1
    full.args["indices"][2] = -1
    yield full
    yield Case("s3_h128_r512_sink", {**full.args, "sink": m.normal(128, dtype="float32")})
    yield case("s1_h1_t9_k1", 1, 1, 9, 1, 128, 64, False)
    yield case("s0_h16_t9_k4", 0, 16, 9, 4, 128, 64, False)
    for packed in (False, True):
        dirty = case(f"s4_h32_t90_k20_poisoned_{packed}", 4, 32, 90, 20, 128, 64, packed)
        dirty.args["indices"] //= 2
        dirty.args["kv"][45:] = 0xFF if packed else float("nan")
        yield dirty
    seen = case("s3_h16_t80_k24_views", 3, 16, 160, 48, 128, 64, False)
    views = {"q": seen.args["q"][:, ::2], "kv": seen.args["kv"][::2], "indices": seen.args["indices"][:, :24] // 2}
    yield Case(seen.id, {**seen.args, **views})


OP = Op(
    name="sparse_mla",
    summary="absorbed latent attention over chosen cache rows",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    kind="function",
    source="sparse latent attention with a learned index",
)
