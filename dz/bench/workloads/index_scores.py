"""Scores of an index."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Checked, Cost, Shape, Workload, dimension, normal
from dz.ops.index_scores import OP


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """The last `queries` tokens of a context; e4m3 comes with scales of the keys."""
    queries, context, heads = (dimension(shape, x) for x in ("queries", "context", "heads"))
    dim, kind = dimension(shape, "head_dim"), str(shape.get("dtype", "float8_e4m3fn"))
    ends = torch.arange(context - queries + 1, context + 1, dtype=torch.int32, device=device)
    args = {
        "q": normal(generator, queries, heads, dim, dtype=kind),
        "k": normal(generator, context, dim, dtype=kind),
        "weights": normal(generator, queries, heads, scale=(heads * dim) ** -0.5),
        "starts": torch.zeros_like(ends),
        "ends": ends,
    }
    return {**args, "k_scale": normal(generator, context).abs_() + 0.5} if kind == "float8_e4m3fn" else args


def cost(shape: Shape) -> Cost:
    """Every key against every query and head; every score written once. The causal corner counts in full."""
    queries, context, heads, dim = (dimension(shape, x) for x in ("queries", "context", "heads", "head_dim"))
    kind = str(shape.get("dtype", "float8_e4m3fn"))
    size = 1 if kind == "float8_e4m3fn" else 2
    moved = size * dim * (queries * heads + context) + 4 * queries * (heads + context)
    return Cost(float(moved), {kind: 2.0 * queries * heads * context * dim})


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """At most 16 queries."""
    step = max(1, args["q"].shape[0] // 16)
    return {**args, **{n: args[n][::step] for n in ("q", "weights", "starts", "ends")}}, result[::step]


def check(got: Any, want: Any) -> Checked:
    """Relative Frobenius error within the windows; outside of them -inf on both sides."""
    seen = want > float("-inf")
    same = bool(((got > float("-inf")) == seen).all())
    g, w = got[seen].double(), want[seen].double()
    rel = float((g - w).norm() / w.norm())
    worst = float((g - w).abs().max())
    loosest = OP.tolerance["float8_e4m3fn"]
    return Checked(rel=rel, max_abs=worst, ok=same and rel <= loosest.rtol, what="relative error in the windows")


WORKLOAD = Workload(
    op="index_scores", build=build, cost=cost, part=part, check=check,
    tiny={"queries": 5, "context": 90, "heads": 4, "head_dim": 32, "dtype": "float32"},
)  # fmt: skip
