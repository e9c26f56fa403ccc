"""Latent attention over chosen rows: a prefill chunk, or one query of each of many sequences."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal
from dz.ops.latent_fp8 import pack, width

ROWS = 1 << 16  # packed at a time


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Rows drawn at random over the whole cache: nothing that neighbouring queries share."""
    queries, context, picks, heads = (dimension(shape, x) for x in ("queries", "context", "picks", "heads"))
    rank, rope, kind = dimension(shape, "rank"), dimension(shape, "rope"), str(shape.get("dtype", "bfloat16"))
    kv = normal(generator, context, rank + rope, dtype=kind)
    if shape.get("packed"):
        kv = torch.cat([pack(x[:, :rank], x[:, rank:]) for x in kv.split(ROWS)])
    return {
        "q": normal(generator, queries, heads, rank + rope, dtype=kind),
        "kv": kv,
        "indices": torch.randint(context, (queries, picks), generator=generator, device=device, dtype=torch.int32),
        "scale": float(shape.get("scale", (rank // 4 + rope) ** -0.5)) * 0.3,
        "value_dim": rank,
    }


def cost(shape: Shape) -> Cost:
    """Two products of each query with its rows; every row of the cache read at most once."""
    queries, context, picks, heads = (dimension(shape, x) for x in ("queries", "context", "picks", "heads"))
    rank, rope = dimension(shape, "rank"), dimension(shape, "rope")
    row = width(rank, rope) if shape.get("packed") else 2 * (rank + rope)
    moved = min(queries * picks, context) * row + 2.0 * queries * heads * (2 * rank + rope) + 4 * queries * picks
    return Cost(moved, {"bfloat16": 2.0 * queries * heads * picks * (2 * rank + rope)})


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 8 queries."""
    step = max(1, args["q"].shape[0] // 8)
    return {**args, **{k: args[k][::step] for k in ("q", "indices")}}, tuple(x[::step] for x in result)


WORKLOAD = Workload(
    op="sparse_mla", build=build, cost=cost, part=part,
    tiny={"queries": 3, "context": 90, "heads": 16, "picks": 40, "rank": 128, "rope": 64, "dtype": "bfloat16"},
)  # fmt: skip
