"""Selection of the best positions of an index."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Normal scores, full windows; `ordered` false unless the shape says otherwise."""
    rows, width = dimension(shape, "rows"), dimension(shape, "width")
    ends = torch.full((rows,), width, dtype=torch.int32, device=device)
    scores = normal(generator, rows, width)
    window = {"starts": torch.zeros_like(ends), "ends": ends}
    return {"scores": scores, **window, "k": dimension(shape, "k"), "ordered": bool(shape.get("ordered", False))}


def cost(shape: Shape) -> Cost:
    """Every score read once, every position written once."""
    rows = dimension(shape, "rows")
    return Cost(4 * rows * dimension(shape, "width") + 4 * rows * dimension(shape, "k"))


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """Every 64th row, in order."""
    step = max(1, args["scores"].shape[0] // 64)
    rows = {k: args[k][::step] for k in ("scores", "starts", "ends")}
    places = result[::step]
    high = torch.iinfo(torch.int32).max
    places = torch.where(places < 0, high, places).sort(dim=1).values
    return {**args, **rows}, torch.where(places == high, -1, places)


WORKLOAD = Workload(
    op="index_topk", build=build, cost=cost, part=part, tiny={"rows": 3, "width": 640, "k": 20, "ordered": False}
)
