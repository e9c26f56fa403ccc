"""MXFP4 expert weights folded to FP8."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Random codes; exponents within 8 of each other, as trained weights have them. `layout`: "flat" or "blocks"."""
    e, n, k = (dimension(shape, x) for x in ("experts", "n", "k"))
    size = (e, n, k // 32, 16) if shape.get("layout") == "blocks" else (e, n, k // 2)
    packed = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
    scales = torch.empty(e, n, k // 32, dtype=torch.uint8, device=device).random_(116, 125, generator=generator)
    return {"packed": packed, "scales": scales}


def cost(shape: Shape) -> Cost:
    """Half a byte and a 32nd read, a byte written for each weight; 8 bytes a row."""
    rows = dimension(shape, "experts") * dimension(shape, "n")
    return Cost(rows * dimension(shape, "k") * (0.5 + 1 / 32 + 1) + 8 * rows)


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """The first, a middle and the last expert."""
    pick = sorted({0, len(args["packed"]) // 2, len(args["packed"]) - 1})
    return {k: v[pick] for k, v in args.items()}, (
        *tuple(t.view(torch.uint8)[pick].view(t.dtype) for t in result[:1]),
        result[1][pick],
        result[2][pick],
    )


WORKLOAD = Workload(
    op="mxfp4_to_fp8", build=build, cost=cost, part=part, tiny={"experts": 2, "n": 24, "k": 96, "layout": "flat"}
)
