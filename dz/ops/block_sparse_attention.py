"""Causal attention of each query over its selected blocks of keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, positions: Tensor, *, scale: float, block_size: int = 128
) -> Tensor:
    """[T, H, D]: softmax(scale * q.k) v over the keys of the selected blocks up to the query's own position.

    q [T, H, D]; k, v [S, Hk, D], head h reads key head h // (H / Hk); blocks [T, Hk, n] int32, -1 for none, a block
    named twice counts once; positions [T] int32. A query without any visible key gives zeros."""
    queries, heads, _ = q.shape
    keys, key_heads, _ = k.shape
    count = -(-keys // block_size)
    chosen = torch.zeros(queries, key_heads, count + 1, dtype=torch.bool, device=q.device)
    named = torch.where((blocks >= 0) & (blocks < count), blocks, count).long()
    chosen.scatter_(2, named, torch.ones_like(named, dtype=torch.bool))
    at = torch.arange(keys, device=q.device)
    seen = chosen[:, :, :count].repeat_interleave(block_size, 2)[..., :keys] & (at <= positions[:, None])[:, None]
    group = heads // key_heads
    logits = torch.einsum("thd,shd->ths", wide(q), wide(k).repeat_interleave(group, 1)) * scale
    logits = logits.masked_fill(~seen.repeat_interleave(group, 1), float("-inf"))
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    return torch.einsum("ths,shd->thd", weights, wide(v).repeat_interleave(group, 1)).to(q.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: grouped and single heads, a ragged last block, blocks named twice or ahead of the query, queries without
    keys, popular blocks, one query, none, views."""
    m = Maker(dtype, device, seed)

    def case(name: str, queries: int, heads: int, keys: int, key_heads: int, dim: int, size: int, n: int) -> Case:
        count = -(-keys // size)
        return Case(
            name,
            {
                "q": m.normal(queries, heads, dim),
                "k": m.normal(keys, key_heads, dim),
                "v": m.normal(keys, key_heads, dim, shift=0.3),
                "blocks": m.ints(-1, count, queries, key_heads, n, dtype="int32"),
                "positions": m.ints(0, keys, queries, dtype="int32"),
                "scale": dim**-0.5,
                "block_size": size,
            },
        )

    yield case("t7_h8_s100_kv2_d32", 7, 8, 100, 2, 32, 16, 4)
    yield case("t33_h2_s70_kv2_d16_popular", 33, 2, 70, 2, 16, 32, 3)
    lonely = case("t6_h4_s64_no_keys", 6, 4, 64, 1, 16, 16, 3)
    lonely.args["blocks"][::2] = -1
    yield lonely
    yield case("t1_h16_s300_kv1_d64_long", 1, 16, 300, 1, 64, 64, 6)
    yield case("t0_h4_s32", 0, 4, 32, 2, 16, 16, 2)
    seen = case("t5_h4_s96_views", 5, 4, 96, 2, 64, 16, 5)
    views = {name: seen.args[name][..., ::2] for name in ("q", "k", "v")}
    yield Case(seen.id, {**seen.args, **views, "scale": 0.25})


OP = Op(
    name="block_sparse_attention",
    summary="causal grouped attention over the selected blocks of keys",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    kind="function",
    source="block-sparse attention with per-group block selection",
)
