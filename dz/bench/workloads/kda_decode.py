"""One step of a KDA layer."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal

WIDTH = 4


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """A conv of width 4, a bounded gate."""
    n, heads, dim = (dimension(shape, x) for x in ("sequences", "heads", "head_dim"))
    kind, channels = str(shape.get("dtype", "bfloat16")), 3 * heads * dim
    return {
        "x": normal(generator, n, channels, dtype=kind),
        "conv_weight": normal(generator, channels, WIDTH, dtype=kind, scale=0.5),
        "conv_state": normal(generator, n, channels, WIDTH - 1, dtype=kind),
        "g": normal(generator, n, heads, dim, dtype=kind),
        "beta": normal(generator, n, heads, dtype=kind),
        "a_log": normal(generator, heads, scale=0.5),
        "dt_bias": normal(generator, heads * dim),
        "state": normal(generator, n, heads, dim, dim),
        "gate": normal(generator, n, heads, dim, dtype=kind),
        "norm_weight": normal(generator, dim, dtype=kind),
        "lower_bound": -5.0,
    }


def cost(shape: Shape) -> Cost:
    """States read and written, 4 bytes each; conv states too, 2 bytes; x, g, gate and o once."""
    n, heads, dim = (dimension(shape, x) for x in ("sequences", "heads", "head_dim"))
    per_head = 8.0 * dim * dim + 2 * dim * (3 * (2 * WIDTH - 1) + 3)
    return Cost(n * heads * per_head + 2.0 * 3 * heads * dim * WIDTH)


WORKLOAD = Workload(
    op="kda_decode", build=build, cost=cost, tiny={"sequences": 3, "heads": 2, "head_dim": 16, "dtype": "float32"}
)
