"""Routing of logits."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Checked, Cost, Shape, Workload, dimension, normal

ALLOWED = 1e-4  # share of choices that the rounding of a score may change


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """fp32 logits, sigmoid scores with a correction, renormalised; `groups` and `top_groups` if the shape says so."""
    tokens, experts = dimension(shape, "tokens"), dimension(shape, "experts")
    return {
        "x": normal(generator, tokens, experts),
        "top_k": dimension(shape, "top_k"),
        "scoring": "sigmoid",
        "correction": normal(generator, experts, scale=0.1),
        "renormalise": True,
        **{k: shape[k] for k in ("groups", "top_groups") if k in shape},
    }


def cost(shape: Shape) -> Cost:
    """Every logit read once; 12 bytes written for each choice."""
    return Cost(dimension(shape, "tokens") * (4.0 * dimension(shape, "experts") + 12 * dimension(shape, "top_k")))


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 512 tokens."""
    step = max(1, len(args["x"]) // 512)
    return {**args, "x": args["x"][::step]}, tuple(t[::step] for t in result)


def check(got: Any, want: Any) -> Checked:
    """The share of choices that differ, and the weights where none does."""
    same = (got[1] == want[1]).all(1)
    missed = 1 - float(same.float().mean()) if len(same) else 0.0
    worst = float((got[0][same] - want[0][same]).abs().max()) if same.any() else 0.0
    ok = missed <= ALLOWED and worst <= 1e-5
    return Checked(rel=missed, max_abs=worst, ok=ok, what="share of tokens whose experts differ")


WORKLOAD = Workload(
    op="router", build=build, cost=cost, part=part, check=check, tiny={"tokens": 5, "experts": 12, "top_k": 3}
)
