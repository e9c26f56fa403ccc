"""Attention over selected blocks of paged caches, one query of each of many sequences."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Sequences of one length, pages in random order, distinct blocks at random."""
    batch, context, n, size = (dimension(shape, x) for x in ("batch", "context", "top_k", "block_size"))
    heads, groups, dim, page = (dimension(shape, x) for x in ("heads", "key_heads", "head_dim", "page"))
    kind, deep, count = str(shape.get("dtype", "bfloat16")), -(-context // page), context // size
    order = torch.randperm(batch * deep, generator=generator, device=device, dtype=torch.int32)
    draw = torch.rand(batch, groups, count, generator=generator, device=device)
    return {
        "q": normal(generator, batch, heads, dim, dtype=kind),
        "k_cache": normal(generator, batch * deep, page, groups, dim, dtype=kind),
        "v_cache": normal(generator, batch * deep, page, groups, dim, dtype=kind),
        "block_table": order.view(batch, deep),
        "lengths": torch.full((batch,), context, dtype=torch.int32, device=device),
        "blocks": draw.topk(min(n, count), -1).indices.to(torch.int32),
        "scale": dim**-0.5,
        "block_size": size,
    }


def cost(shape: Shape) -> Cost:
    """Keys and values of the selected blocks once, two products with them."""
    batch, n, size, dim = (dimension(shape, x) for x in ("batch", "top_k", "block_size", "head_dim"))
    heads, groups = dimension(shape, "heads"), dimension(shape, "key_heads")
    keys = min(n * size, dimension(shape, "context"))
    moved = 2.0 * dim * batch * (2 * heads + 2 * keys * groups)
    return Cost(moved, {"bfloat16": 4.0 * batch * heads * keys * dim})


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """The first sequence."""
    used = args["block_table"][0].long()
    some = {k: args[k][:1] for k in ("q", "lengths", "blocks")}
    some["block_table"] = torch.arange(len(used), dtype=torch.int32, device=used.device)[None]
    return {**args, **some, "k_cache": args["k_cache"][used], "v_cache": args["v_cache"][used]}, result[:1]


WORKLOAD = Workload(
    op="block_sparse_decode", build=build, cost=cost, part=part,
    tiny={"batch": 2, "context": 96, "heads": 4, "key_heads": 2, "head_dim": 64, "page": 32, "block_size": 32,
          "top_k": 2},
)  # fmt: skip
