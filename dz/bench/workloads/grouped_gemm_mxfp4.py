"""MXFP4 products of experts with bfloat16 activations."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal
from dz.bench.workloads.grouped_gemm_fp8 import few_experts, offsets


def four_bit_weights(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random codes; exponents within 8 of each other, as trained weights have them."""
    e, n, k = (dimension(shape, x) for x in ("experts", "n", "k"))
    packed = torch.empty(e, n, k // 2, dtype=torch.uint8, device=generator.device)
    scales = torch.empty(e, n, k // 32, dtype=torch.uint8, device=generator.device)
    return {
        "packed": packed.random_(0, 256, generator=generator),
        "scales": scales.random_(114, 122, generator=generator),
    }


def four_bit_cost(shape: Shape, x_bytes: int, dtype: str) -> Cost:
    """The hit experts' codes and scales and the activations read once, bfloat16 results written once."""
    e, n, k, rows = (dimension(shape, x) for x in ("experts", "n", "k", "rows"))
    hit = e * (1 - (1 - 1 / e) ** rows)
    return Cost(hit * n * k * (0.5 + 1 / 32) + rows * (x_bytes * k + 2.0 * n), {dtype: 2.0 * rows * n * k})


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """bfloat16 activations of unit scale, flat codes."""
    rows = dimension(shape, "rows")
    return {
        "x": normal(generator, rows, dimension(shape, "k"), dtype="bfloat16"),
        **four_bit_weights(shape, generator),
        "offsets": offsets(rows, dimension(shape, "experts"), generator),
    }


def cost(shape: Shape) -> Cost:
    """See four_bit_cost."""
    return four_bit_cost(shape, 2, "bfloat16")


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """See few_experts."""
    return few_experts(args, result, ("packed", "scales"))


WORKLOAD = Workload(
    op="grouped_gemm_mxfp4", build=build, cost=cost, part=part, tiny={"experts": 3, "n": 24, "k": 64, "rows": 9}
)
