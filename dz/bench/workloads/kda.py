"""Linear attention with a decay for each channel: prompts of some tokens, or one token of many sequences."""

from __future__ import annotations

from typing import Any

import torch

from dz.bench.workload import Cost, Shape, Workload, dimension, normal


def build(shape: Shape, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """`tokens` of each of `sequences`, a bounded gate, beta logits, a state; packed in one row for more than one
    token, a batch for one."""
    n, tokens, heads, dim = (dimension(shape, x) for x in ("sequences", "tokens", "heads", "head_dim"))
    kind, packed = str(shape.get("dtype", "bfloat16")), tokens > 1 and n > 1
    lead = (1, n * tokens) if packed else (n, tokens)
    args: dict[str, Any] = {x: normal(generator, *lead, heads, dim, dtype=kind) for x in ("q", "k", "v", "g")}
    args |= {
        "beta": normal(generator, *lead, heads, dtype=kind),
        "a_log": normal(generator, heads, scale=0.5),
        "dt_bias": normal(generator, heads * dim),
        "lower_bound": -5.0,
        "beta_logits": True,
        "state": normal(generator, n, heads, dim, dim),
    }
    if packed:
        args["cu_seqlens"] = torch.arange(n + 1, device=device, dtype=torch.int32) * tokens
    return args


def cost(shape: Shape) -> Cost:
    """q, k, v, g and o once, 2 bytes each; states read and written, 4 bytes; per token and head the least arithmetic of
    the chunked form (chunks of 64) or, for one token, of the step."""
    n, tokens, heads, dim = (dimension(shape, x) for x in ("sequences", "tokens", "heads", "head_dim"))
    rows = float(n * tokens * heads)
    moved = rows * 10 * dim + 8.0 * n * heads * dim * dim
    return Cost(moved, {"bfloat16": rows * 2 * (3 * dim * dim + 4.5 * 64 * dim)} if tokens > 1 else {})


def part(args: dict[str, Any], result: Any) -> tuple[dict[str, Any], Any]:
    """The first and the last head of a long prompt."""
    heads = args["q"].shape[2]
    if args["q"].shape[1] == 1 or heads < 3:
        return args, result
    step, dim = heads - 1, args["k"].shape[-1]
    some = {**args, **{x: args[x][:, :, ::step] for x in ("q", "k", "v", "g", "beta")}, "a_log": args["a_log"][::step]}
    some |= {"dt_bias": args["dt_bias"].view(heads, dim)[::step].flatten(), "state": args["state"][:, ::step]}
    return some, (result[0][:, :, ::step], result[1][:, ::step])


WORKLOAD = Workload(
    op="kda", build=build, cost=cost, part=part, tiny={"sequences": 2, "tokens": 5, "heads": 2, "head_dim": 16}
)
