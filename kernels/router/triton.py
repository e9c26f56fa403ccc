"""Routing in one pass: a row of logits in registers, as groups by experts; each choice is a maximum and its index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.errors import UsageError
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, support, unknown
from dz.kernels.common.tuned import Tunable
from dz.ops.router import check

MOST = 4096  # experts
SCORINGS = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2, "topk_softmax": 3}
TUNE = Tunable(
    "router/triton", {"each": 256}, {"default": [{"each": 128}, {"each": 256}, {"each": 512}, {"each": 1024}]}
)


@triton.jit
def _scores(logits, inside, SCORING: tl.constexpr):
    if SCORING == 0:
        top = tl.max(tl.max(tl.where(inside, logits, float("-inf")), 1), 0)
        e = tl.where(inside, tl.exp(logits - top), 0.0)
        return e / tl.sum(tl.sum(e, 1), 0)
    if SCORING == 1:
        e = tl.exp(-tl.abs(logits))
        return tl.where(logits >= 0, 1.0, e) / (1.0 + e)
    if SCORING == 2:
        # log(1 + e) loses a small e: corrected by what 1 + e really was
        e = tl.exp(-tl.abs(logits))
        one = 1.0 + e
        log = tl.where(one == 1.0, e, tl.log(one) * (e / (one - 1.0)))
        return tl.sqrt_rn(tl.maximum(logits, 0.0) + log)
    return logits


@triton.jit
def _kept_groups(choice, inside, groups, top_groups, group_top, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """[GROUPS] whether a group is among the best by the sum of its best entries; of equals the lowest."""
    j = tl.arange(0, EACH)[None, :]
    free = inside
    total = tl.zeros([GROUPS], tl.float32)
    for _ in range(group_top):
        best = tl.max(tl.where(free, choice, float("-inf")), 1)
        total += best
        first = tl.min(tl.where(free & (choice == best[:, None]), j, EACH), 1)
        free = free & (j != first[:, None])
    g = tl.arange(0, GROUPS)
    open = g < groups
    for _ in range(top_groups):
        best = tl.max(tl.where(open, total, float("-inf")), 0)
        open = open & (g != tl.min(tl.where(open & (total == best), g, GROUPS), 0))
    return (g < groups) & (open == 0)


@triton.jit
def _kernel(
    logits, bias, correction, chosen, weights, experts, per_group, groups, top_groups, group_top, top_k, scale, eps,
    l_row, l_col, b_col, c_col, h_row, h_col,
    SCORING: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr, CHOSEN: tl.constexpr, RENORM: tl.constexpr,
    GROUPS: tl.constexpr, EACH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUPS)[:, None]
    j = tl.arange(0, EACH)[None, :]
    index = g * per_group + j
    inside = (g < groups) & (j < per_group)
    x = tl.load(logits + row * l_row + index * l_col, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + index * b_col, mask=inside, other=0.0).to(tl.float32)
    scores = _scores(x, inside, SCORING)
    choice = scores
    if CORRECTION:
        choice += tl.load(correction + index * c_col, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(choice != choice, float("inf"), choice)  # NaN ranks first, as in a sort, and stays in the weights
    free = inside
    if GROUPS > 1 and not CHOSEN:
        free = free & _kept_groups(choice, inside, groups, top_groups, group_top, GROUPS, EACH)[:, None]
    k = tl.arange(0, K)
    picked = tl.zeros([K], tl.float32)
    which = tl.zeros([K], tl.int32)
    for i in range(top_k):
        if CHOSEN:
            best = tl.load(chosen + row * h_row + i * h_col).to(tl.int32)
        else:
            top = tl.max(tl.max(tl.where(free, choice, float("-inf")), 1), 0)
            best = tl.min(tl.min(tl.where(free & (choice == top), index, GROUPS * EACH), 1), 0)
            free = free & (index != best)
        score = tl.sum(tl.sum(tl.where(inside & (index == best), scores, 0.0), 1), 0)
        picked = tl.where(k == i, score, picked)
        which = tl.where(k == i, best, which)
    real = k < top_k
    if SCORING == 3:
        picked = tl.exp(picked - tl.max(tl.where(real, picked, float("-inf")), 0))
        picked = picked / tl.sum(tl.where(real, picked, 0.0), 0)
    if RENORM:
        picked = picked / (tl.sum(tl.where(real, picked, 0.0), 0) + eps)
    tl.store(weights + row * top_k + k, picked * scale, mask=real)
    tl.store(experts + row * top_k + k, which.to(tl.int64), mask=real)


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Products of 16-bit numbers are exact in fp32, where the device adds them up; others are widened."""
    if x.is_cuda and x.dtype == weight.dtype and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


def run(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_top: int = 2,
    renormalise: bool = False,
    scale: float = 1.0,
    eps: float = 1e-20,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See dz.ops.router.reference."""
    count = (x if weight is None else weight.t()).shape[-1]
    check(count, top_k, scoring, groups, top_groups, group_top if groups > 1 else 1)
    weights = torch.empty(x.shape[0], top_k, dtype=torch.float32, device=x.device)
    experts = torch.empty(x.shape[0], top_k, dtype=torch.int64, device=x.device)
    if not x.shape[0]:
        return weights, experts
    logits = x if weight is None else _logits(x, weight)
    each = power_of_two(count // groups)
    with on(x):
        _kernel[(x.shape[0],)](
            logits, bias, correction, chosen, weights, experts, count // groups, groups, top_groups, group_top, top_k,
            scale, eps, *logits.stride(), *(0 if t is None else t.stride(0) for t in (bias, correction)),
            *((0, 0) if chosen is None else chosen.stride()),
            SCORING=SCORINGS[scoring], BIAS=bias is not None, CORRECTION=correction is not None,
            CHOSEN=chosen is not None, RENORM=renormalise, GROUPS=power_of_two(groups), EACH=each,
            K=power_of_two(top_k),
            num_warps=min(8, power_of_two(power_of_two(groups) * each // TUNE.pick(x.device)["each"])),
        )  # fmt: skip
    return weights, experts


def _misfit(args: Mapping[str, Any], count: int) -> str:
    """What `check` or the reference would raise for."""
    groups, chosen = args.get("groups", 1), args.get("chosen")
    group_top = args.get("group_top", 2) if groups > 1 else 1
    try:
        check(count, args["top_k"], args.get("scoring", "softmax"), groups, args.get("top_groups", 1), group_top)
    except UsageError as e:
        return e.what
    if chosen is not None and tuple(chosen.shape) != (args["x"].shape[0], args["top_k"]):
        return f"chosen experts of shape {list(chosen.shape)}"
    return ""


def supports(args: Mapping[str, Any]) -> Support:
    """Every argument of the op; up to 4096 experts."""
    names = ("x", "weight", "bias", "correction", "chosen")
    options = ("top_k", "scoring", "groups", "top_groups", "group_top", "renormalise", "scale", "eps")
    weight = args.get("weight")
    count = (args["x"] if weight is None else weight.t()).shape[-1]
    return support(
        unknown(args, (*names, *options)),
        dtypes(args, names[:4], FLOATS),
        dtypes(args, ("chosen",), ("int32", "int64")),
        one_device(args),
        f"{count} experts; takes at most {MOST}" if count > MOST else "",
        _misfit(args, count),
    )


KERNEL = Kernel(
    op="router",
    technique="triton",
    summary="scores, groups, choice and weights of a row in one launch after the gate's product",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=FLOATS),
    supports=supports,
)
