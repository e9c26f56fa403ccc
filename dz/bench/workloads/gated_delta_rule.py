"""Linear attention with one decay for each head: prompts of some tokens, or one token of many sequences."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """`tokens` of each of `sequences` in a batch, decays of about exp(-0.4), betas in (0, 1), a state."""
    n, tokens, heads, dim = (dimension(shape, x) for x in ("sequences", "tokens", "heads", "head_dim"))
    kind = str(shape.get("dtype", "bfloat16"))
    keys = (n, tokens, dimension(shape, "key_heads"), dim)
    return {
        "q": normal(generator, *keys, dtype=kind),
        "k": normal(generator, *keys, dtype=kind),
        "v": normal(generator, n, tokens, heads, dim, dtype=kind),
        "g": -normal(generator, n, tokens, heads, scale=0.5).abs(),
        "beta": normal(generator, n, tokens, heads, dtype=kind).sigmoid(),
        "state": normal(generator, n, heads, dim, dim),
    }


def cost(shape: Shape) -> Cost:
    """q, k, v and o once, 2 bytes each, g and beta; states read and written; per token and value head the least
    arithmetic of the chunked form (chunks of 64) or, for one token, of the step."""
    n, tokens, heads, dim = (dimension(shape, x) for x in ("sequences", "tokens", "heads", "head_dim"))
    rows = float(n * tokens)
    moved = rows * (4 * dim * (heads + dimension(shape, "key_heads")) + 6 * heads) + 8.0 * n * heads * dim * dim
    return Cost(moved, {"bfloat16": rows * heads * 2 * (3 * dim * dim + 4.5 * 64 * dim)} if tokens > 1 else {})


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """The value heads of the first key head."""
    some = args["v"].shape[2] // args["k"].shape[2]
    cut = {x: args[x][:, :, :some] for x in ("v", "g", "beta")} | {x: args[x][:, :, :1] for x in ("q", "k")}
    return {**args, **cut, "state": args["state"][:, :some]}, (result[0][:, :, :some], result[1][:, :some])


WORKLOAD = Workload(
    op="gated_delta_rule", build=build, cost=cost, part=part,
    tiny={"sequences": 2, "tokens": 5, "heads": 4, "key_heads": 2, "head_dim": 16},
)  # fmt: skip
