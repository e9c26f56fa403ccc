"""FP8 products of experts."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def offsets(rows: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    """Where each expert's rows begin (int32 [E + 1]) when each row has taken any expert with equal chance."""
    chosen = torch.randint(0, experts, (rows,), generator=generator, device=generator.device)
    counts = torch.bincount(chosen, minlength=experts)
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()


def eight_bit_rows(generator: torch.Generator, rows: int, k: int) -> dict[str, torch.Tensor]:
    """Normal activations as FP8 codes with a power-of-two scale for each row."""
    scale = torch.full((rows,), 2.0**-6, device=generator.device)
    return {"x": normal(generator, rows, k, dtype="float8_e4m3fn", scale=64.0), "x_scale": scale}


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Normal codes of both operands; row scales of the weights as a fold of MXFP4 gives them."""
    e, n, k, rows = (dimension(shape, x) for x in ("experts", "n", "k", "rows"))
    powers = torch.randint(-14, -10, (e, n), generator=generator, device=device)
    return {
        **eight_bit_rows(generator, rows, k),
        "weight": normal(generator, e, n, k, dtype="float8_e4m3fn", scale=64.0),
        "weight_scale": torch.exp2(powers.float()),
        "offsets": offsets(rows, e, generator),
    }


def cost(shape: Shape) -> Cost:
    """Every weight and activation read once, bfloat16 results written once."""
    e, n, k, rows = (dimension(shape, x) for x in ("experts", "n", "k", "rows"))
    hit = e * (1 - (1 - 1 / e) ** rows)
    return Cost(hit * n * k + rows * (k + 2.0 * n), {"float8_e4m3fn": 2.0 * rows * n * k})


def few_experts(args: dict[str, Any], result: Any, weights: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
    """Three experts (the first, a middle one, the last) with at most 64 rows each, and their rows of the result;
    `weights` are the arguments that have experts as their first axis."""
    ends = args["offsets"].tolist()
    pick = sorted({0, (len(ends) - 1) // 2, len(ends) - 2})
    spans = [range(ends[e], min(ends[e + 1], ends[e] + 64)) for e in pick]
    rows = torch.tensor([r for span in spans for r in span], device=result.device, dtype=torch.long)
    some = {name: args[name].view(torch.uint8)[rows].view(args[name].dtype) for name in ("x",)}
    some |= {name: args[name][rows] for name in ("x_scale",) if name in args}
    some |= {name: torch.stack([args[name][e] for e in pick]) for name in weights}
    counts = torch.tensor([0, *(len(s) for s in spans)], device=result.device)
    return {**args, **some, "offsets": counts.cumsum(0).int()}, result[rows]


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """See few_experts."""
    return few_experts(args, result, ("weight", "weight_scale"))


WORKLOAD = Workload(
    op="grouped_gemm_fp8", build=build, cost=cost, part=part, tiny={"experts": 3, "n": 24, "k": 64, "rows": 9}
)
