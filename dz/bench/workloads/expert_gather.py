"""Rows of tokens by expert, in FP8."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """bfloat16 tokens, each row any choice of them."""
    tokens, k, rows = (dimension(shape, x) for x in ("tokens", "top_k", "rows"))
    chosen = torch.randint(0, tokens * k, (rows,), generator=generator, device=device).int()
    return {"x": normal(generator, tokens, dimension(shape, "dim"), dtype="bfloat16"), "rows": chosen, "k": k}


def cost(shape: Shape) -> Cost:
    """Two bytes read, one written for each number."""
    rows = dimension(shape, "rows")
    return Cost(rows * (3.0 * dimension(shape, "dim") + 8))


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 256 rows."""
    step = max(1, len(args["rows"]) // 256)
    codes = result[0].view(torch.uint8)[::step].view(result[0].dtype)
    return {**args, "rows": args["rows"][::step]}, (codes, result[1][::step])


WORKLOAD = Workload(
    op="expert_gather", build=build, cost=cost, part=part, tiny={"tokens": 5, "rows": 7, "dim": 48, "top_k": 2}
)
