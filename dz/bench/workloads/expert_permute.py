"""Choices sorted by expert."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Any of `routed` experts with equal chance, the first `experts` of them here."""
    size = (dimension(shape, "tokens"), dimension(shape, "top_k"))
    index = torch.randint(0, dimension(shape, "routed"), size, generator=generator, device=device)
    return {"index": index, "experts": dimension(shape, "experts")}


def cost(shape: Shape) -> Cost:
    """8 bytes read, 8 written for each choice."""
    return Cost(16.0 * dimension(shape, "tokens") * dimension(shape, "top_k"))


WORKLOAD = Workload(
    op="expert_permute", build=build, cost=cost, tiny={"tokens": 5, "top_k": 3, "routed": 9, "experts": 4}
)
