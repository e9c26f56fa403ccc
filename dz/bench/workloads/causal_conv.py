"""Short causal convolution over the channels of a layer, a prompt or one token of many sequences."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal

WIDTH = 4


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Width 4, SiLU, a state; channels contiguous, as a projection gives them."""
    n, tokens, channels = (dimension(shape, x) for x in ("sequences", "tokens", "channels"))
    kind = str(shape.get("dtype", "bfloat16"))
    return {
        "x": normal(generator, n, tokens, channels, dtype=kind).transpose(1, 2),
        "weight": normal(generator, channels, WIDTH, dtype=kind, scale=0.5),
        "state": normal(generator, n, channels, WIDTH - 1, dtype=kind),
        "activation": "silu",
    }


def cost(shape: Shape) -> Cost:
    """x read and y written once, states read and written, 2 bytes each."""
    n, tokens, channels = (dimension(shape, x) for x in ("sequences", "tokens", "channels"))
    return Cost(4.0 * n * channels * (tokens + WIDTH - 1) + 2 * channels * WIDTH)


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 256 channels."""
    step = max(1, args["weight"].shape[0] // 256)
    cut = {k: args[k][:, ::step] for k in ("x", "state")} | {"weight": args["weight"][::step]}
    return {**args, **cut}, tuple(t[:, ::step] for t in result)


WORKLOAD = Workload(
    op="causal_conv", build=build, cost=cost, part=part, tiny={"sequences": 2, "tokens": 9, "channels": 24}
)
