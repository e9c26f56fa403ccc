"""Attention over depth."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """bfloat16 sources of unit scale, an output norm. Prefix and delta lie on a grid of 1/16 whose sums bfloat16 holds:
    the truth knows no storage dtype, so only then has it the same update; the rounding is the contract's to check."""
    n, tokens, dim = (dimension(shape, x) for x in ("blocks", "tokens", "hidden"))
    kind = str(shape.get("dtype", "bfloat16"))
    return {
        "blocks": normal(generator, n, tokens, dim, dtype=kind),
        "prefix": _on_grid(normal(generator, tokens, dim, dtype=kind)),
        "delta": _on_grid(normal(generator, tokens, dim, dtype=kind)),
        "norm_weight": normal(generator, dim, dtype=kind),
        "query": normal(generator, dim, dtype=kind, scale=dim**-0.5),
        "out_weight": normal(generator, dim, dtype=kind),
        "eps": 1e-5,
    }


def _on_grid(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(16).round_().div_(16).clamp_(-7, 7)


def cost(shape: Shape) -> Cost:
    """Blocks, prefix and delta read once; prefix and mix written once; 2 bytes each."""
    tokens, dim = dimension(shape, "tokens"), dimension(shape, "hidden")
    return Cost(2.0 * tokens * dim * (dimension(shape, "blocks") + 4) + 6 * dim)


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 256 tokens."""
    step = max(1, args["prefix"].shape[0] // 256)
    rows = {k: args[k][::step] for k in ("prefix", "delta")}
    return {**args, **rows, "blocks": args["blocks"][:, ::step]}, tuple(t[::step] for t in result)


WORKLOAD = Workload(op="residual_mix", build=build, cost=cost, part=part, tiny={"blocks": 3, "tokens": 5, "hidden": 96})
