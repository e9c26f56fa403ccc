"""Attention over selected blocks, prefill."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """The last `queries` tokens of a context; each chooses its own block and others at random (nothing is shared
    between neighbours, the hardest case for reuse)."""
    queries, context, n = (dimension(shape, x) for x in ("queries", "context", "top_k"))
    heads, groups, dim = (dimension(shape, x) for x in ("heads", "key_heads", "head_dim"))
    size, kind = dimension(shape, "block_size"), str(shape.get("dtype", "bfloat16"))
    positions = torch.arange(context - queries, context, dtype=torch.int32, device=device)
    own = (positions // size).to(torch.int32)
    draw = torch.rand(queries, groups, n, generator=generator, device=device)
    blocks = (draw * own[:, None, None]).to(torch.int32)
    blocks[..., 0] = own[:, None]
    return {
        "q": normal(generator, queries, heads, dim, dtype=kind),
        "k": normal(generator, context, groups, dim, dtype=kind),
        "v": normal(generator, context, groups, dim, dtype=kind),
        "blocks": blocks,
        "positions": positions,
        "scale": dim**-0.5,
        "block_size": size,
    }


def cost(shape: Shape) -> Cost:
    """Two products of the queries with the keys of top_k blocks; queries, keys, values and result moved once."""
    queries, context, dim = (dimension(shape, x) for x in ("queries", "context", "head_dim"))
    heads, groups = dimension(shape, "heads"), dimension(shape, "key_heads")
    keys = min(dimension(shape, "top_k") * dimension(shape, "block_size"), context)
    moved = 2.0 * dim * (2 * queries * heads + 2 * context * groups)
    return Cost(moved, {"bfloat16": 4.0 * queries * heads * keys * dim})


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 16 queries."""
    step = max(1, args["q"].shape[0] // 16)
    return {**args, **{k: args[k][::step] for k in ("q", "blocks", "positions")}}, result[::step]


WORKLOAD = Workload(
    op="block_sparse_attention", build=build, cost=cost, part=part,
    tiny={"queries": 6, "context": 90, "heads": 4, "key_heads": 2, "head_dim": 16, "block_size": 16, "top_k": 3,
          "dtype": "float32"},
)  # fmt: skip
