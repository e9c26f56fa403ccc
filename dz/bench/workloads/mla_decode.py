"""Latent attention of one query a sequence over a paged cache."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal
from dz.ops.latent_fp8 import pack, width

ROWS = 1 << 16  # packed at a time


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Sequences of one length, their blocks in random order."""
    batch, context, page, heads = (dimension(shape, x) for x in ("batch", "context", "page", "heads"))
    rank, rope, kind = dimension(shape, "rank"), dimension(shape, "rope"), str(shape.get("dtype", "bfloat16"))
    deep = -(-context // page)
    cache = normal(generator, batch * deep * page, rank + rope, dtype=kind)
    if shape.get("packed"):
        cache = torch.cat([pack(x[:, :rank], x[:, rank:]) for x in cache.split(ROWS)])
    order = torch.randperm(batch * deep, generator=generator, device=device, dtype=torch.int32)
    return {
        "q": normal(generator, batch, heads, rank + rope, dtype=kind),
        "cache": cache.view(batch * deep, page, -1),
        "block_table": order.view(batch, deep),
        "lengths": torch.full((batch,), context, dtype=torch.int32, device=device),
        "scale": (rank // 4 + rope) ** -0.5 * 0.3,
        "value_dim": rank,
    }


def cost(shape: Shape) -> Cost:
    """Two products of each query with its rows; every row read once."""
    batch, context, heads = (dimension(shape, x) for x in ("batch", "context", "heads"))
    rank, rope = dimension(shape, "rank"), dimension(shape, "rope")
    row = width(rank, rope) if shape.get("packed") else 2 * (rank + rope)
    moved = batch * context * row + 2.0 * batch * heads * (2 * rank + rope)
    return Cost(moved, {"bfloat16": 2.0 * batch * heads * context * (2 * rank + rope)})


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """The first sequence."""
    some = {k: args[k][:1] for k in ("q", "block_table", "lengths")}
    used = some["block_table"][0].long()
    some["block_table"] = torch.arange(len(used), dtype=torch.int32, device=used.device)[None]
    return {**args, **some, "cache": args["cache"][used]}, tuple(x[:1] for x in result)


WORKLOAD = Workload(
    op="mla_decode", build=build, cost=cost, part=part,
    tiny={"batch": 2, "context": 70, "page": 16, "heads": 12, "rank": 128, "rope": 64},
)  # fmt: skip
