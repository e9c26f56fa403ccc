"""Weighted sums over the experts of a token."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """bfloat16 rows in any order, every choice present once."""
    tokens, k = dimension(shape, "tokens"), dimension(shape, "top_k")
    places = torch.randperm(tokens * k, generator=generator, device=device).view(tokens, k).int()
    return {
        "y": normal(generator, tokens * k, dimension(shape, "dim"), dtype="bfloat16"),
        "places": places,
        "weight": torch.rand(tokens, k, generator=generator, device=device),
    }


def cost(shape: Shape) -> Cost:
    """Every row read once, every sum written once."""
    tokens, k = dimension(shape, "tokens"), dimension(shape, "top_k")
    return Cost(tokens * (2.0 * dimension(shape, "dim") * (k + 1) + 8 * k))


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 256 tokens."""
    step = max(1, len(args["places"]) // 256)
    return {**args, **{k: args[k][::step] for k in ("places", "weight")}}, result[::step]


WORKLOAD = Workload(op="expert_combine", build=build, cost=cost, part=part, tiny={"tokens": 5, "top_k": 3, "dim": 48})
