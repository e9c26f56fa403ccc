"""RMS normalisation of the residual stream."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """bfloat16 rows with the residual to add."""
    tokens, dim = dimension(shape, "tokens"), dimension(shape, "hidden")
    x, residual = (normal(generator, tokens, dim, dtype="bfloat16") for _ in range(2))
    weight = normal(generator, dim, dtype="bfloat16")
    return {"x": x, "weight": weight, "eps": 1e-5, "cast_first": False, "residual": residual}


def cost(shape: Shape) -> Cost:
    """Two rows read, two written."""
    return Cost(8.0 * dimension(shape, "tokens") * dimension(shape, "hidden"))


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 256 rows."""
    step = max(1, args["x"].shape[0] // 256)
    return {**args, **{k: args[k][::step] for k in ("x", "residual")}}, tuple(t[::step] for t in result)


WORKLOAD = Workload(op="rms_norm", build=build, cost=cost, part=part, tiny={"tokens": 5, "hidden": 96})
