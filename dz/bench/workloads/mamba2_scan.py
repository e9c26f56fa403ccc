"""Selective scans: prompts of some tokens, or one token of many sequences."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """`tokens` of each of `sequences`, a bias and a skip, a state."""
    n, tokens, heads, dim = (dimension(shape, x) for x in ("sequences", "tokens", "heads", "head_dim"))
    groups, width, kind = dimension(shape, "groups"), dimension(shape, "state"), str(shape.get("dtype", "bfloat16"))
    return {
        "x": normal(generator, n, tokens, heads, dim, dtype=kind),
        "dt": normal(generator, n, tokens, heads, dtype=kind),
        "A": -normal(generator, heads).exp(),
        "B": normal(generator, n, tokens, groups, width, dtype=kind, scale=width**-0.5),
        "C": normal(generator, n, tokens, groups, width, dtype=kind, scale=width**-0.5),
        "D": normal(generator, heads),
        "dt_bias": normal(generator, heads),
        "state": normal(generator, n, heads, dim, width),
    }


def cost(shape: Shape) -> Cost:
    """x, y, B and C once, 2 bytes each; states read and written, 4 bytes each."""
    n, tokens, heads, dim = (dimension(shape, x) for x in ("sequences", "tokens", "heads", "head_dim"))
    width = dimension(shape, "state")
    moved = float(n * tokens) * (4 * heads * dim + 4 * dimension(shape, "groups") * width + 2 * heads)
    return Cost(moved + 8.0 * n * heads * dim * width)


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """The heads of the first group."""
    some = args["x"].shape[2] // args["B"].shape[2]
    cut = {k: args[k][:, :, :some] for k in ("x", "dt")} | {k: args[k][:, :, :1] for k in ("B", "C")}
    cut |= {k: args[k][:some] for k in ("A", "D", "dt_bias")} | {"state": args["state"][:, :some]}
    return {**args, **cut}, (result[0][:, :, :some], result[1][:, :some])


WORKLOAD = Workload(
    op="mamba2_scan", build=build, cost=cost, part=part,
    tiny={"sequences": 2, "tokens": 4, "heads": 4, "groups": 2, "head_dim": 8, "state": 16},
)  # fmt: skip
