"""Block scores and the choice of the best blocks."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Checked, Cost, Shape, Workload, dimension, normal

ALLOWED = 1e-3  # share of choices that rounding may change: near ties of scores summed in another order


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """The last `queries` tokens of a context."""
    queries, context, heads = (dimension(shape, x) for x in ("queries", "context", "heads"))
    dim, kind = dimension(shape, "head_dim"), str(shape.get("dtype", "bfloat16"))
    return {
        "q": normal(generator, queries, heads, dim, dtype=kind),
        "k": normal(generator, context, dimension(shape, "key_heads"), dim, dtype=kind),
        "positions": torch.arange(context - queries, context, dtype=torch.int32, device=device),
        "block_size": dimension(shape, "block_size"),
        "top_k": dimension(shape, "top_k"),
    }


def cost(shape: Shape) -> Cost:
    """Every key against every query and index head; causal corner counted in full."""
    queries, context, dim = (dimension(shape, x) for x in ("queries", "context", "head_dim"))
    heads = dimension(shape, "heads")
    moved = 2.0 * dim * (queries * heads + context * dimension(shape, "key_heads"))
    return Cost(
        moved + 4 * queries * heads * dimension(shape, "top_k"), {"bfloat16": 2.0 * queries * heads * context * dim}
    )


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 32 queries."""
    step = max(1, args["q"].shape[0] // 32)
    return {**args, "q": args["q"][::step], "positions": args["positions"][::step]}, result[::step]


def check(got: Any, want: Any) -> Checked:
    """The share of wanted blocks that were not chosen."""
    here = (want[..., :, None] == got[..., None, :]).any(-1) | (want < 0)
    missed = float((~here).sum()) / max(int((want >= 0).sum()), 1)
    return Checked(rel=missed, max_abs=missed, ok=missed <= ALLOWED, what="share of wanted blocks not chosen")


WORKLOAD = Workload(
    op="block_select", build=build, cost=cost, part=part, check=check,
    tiny={"queries": 6, "context": 90, "heads": 4, "key_heads": 1, "head_dim": 16, "block_size": 16, "top_k": 3,
          "dtype": "float32"},
)  # fmt: skip
