"""Paged attention: one query of each of many sequences, or a whole prompt."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Sequences of one length with `queries` queries each, their blocks in random order."""
    batch, context, queries, page = (dimension(shape, x) for x in ("batch", "context", "queries", "page"))
    heads, groups, dim = (dimension(shape, x) for x in ("heads", "key_heads", "head_dim"))
    kind, deep = str(shape.get("dtype", "bfloat16")), -(-context // page)
    order = torch.randperm(batch * deep, generator=generator, device=device, dtype=torch.int32)
    args: dict[str, Any] = {
        "q": normal(generator, batch * queries, heads, dim, dtype=kind),
        "k_cache": normal(generator, batch * deep, page, groups, dim, dtype=kind),
        "v_cache": normal(generator, batch * deep, page, groups, dim, dtype=kind),
        "block_table": order.view(batch, deep),
        "kv_lengths": torch.full((batch,), context, dtype=torch.int32, device=device),
        "cu_q": torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
        "scale": dim**-0.5,
    }
    if shape.get("sinks"):
        args["sinks"] = normal(generator, heads)
    if shape.get("window"):
        args["window"] = dimension(shape, "window")
    return args


def cost(shape: Shape) -> Cost:
    """Two products of each query with the keys that it sees; queries, their keys and values, and the result once."""
    batch, context, queries = (dimension(shape, x) for x in ("batch", "context", "queries"))
    heads, groups, dim = (dimension(shape, x) for x in ("heads", "key_heads", "head_dim"))
    seen = min(context, int(shape.get("window", context)))
    moved = 2.0 * dim * batch * (2 * queries * heads + 2 * min(context, seen + queries) * groups)
    pairs = batch * queries * (min(context - (queries - 1) / 2, seen))
    return Cost(moved, {"bfloat16": 4.0 * heads * dim * pairs})


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """The first sequence: its last 64 queries, which see most."""
    last = int(args["cu_q"][1])
    first = max(0, last - 64)
    some = {"q": args["q"][first:last], "block_table": args["block_table"][:1], "kv_lengths": args["kv_lengths"][:1]}
    cu = torch.tensor([0, last - first], dtype=torch.int32, device=args["q"].device)
    return {**args, **some, "cu_q": cu}, result[first:last]


WORKLOAD = Workload(
    op="paged_attention", build=build, cost=cost, part=part,
    tiny={"batch": 2, "context": 40, "queries": 1, "heads": 4, "key_heads": 2, "head_dim": 64, "page": 16},
)  # fmt: skip
