"""The product of an activated gate and an up projection."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """bfloat16 halves of one projection; further keys of the shape are the op's own arguments."""
    tokens, width = dimension(shape, "tokens"), dimension(shape, "inner")
    options = {k: shape[k] for k in ("activation", "interleaved", "alpha", "limit", "shift") if k in shape}
    return {"gate": normal(generator, tokens, 2 * width, dtype="bfloat16", scale=2.0), **options}


def cost(shape: Shape) -> Cost:
    """Two values read, one written."""
    return Cost(6.0 * dimension(shape, "tokens") * dimension(shape, "inner"))


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 256 rows."""
    step = max(1, args["gate"].shape[0] // 256)
    return {**args, "gate": args["gate"][::step]}, result[::step]


WORKLOAD = Workload(op="gated_activation", build=build, cost=cost, part=part, tiny={"tokens": 5, "inner": 48})
