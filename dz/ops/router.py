"""Expert routing: scores from logits, a choice of experts, their weights."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops._routing import router as recognise
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide

# sqrt_softplus goes through log1p: log(1 + exp(x)) is exactly 0 in fp32 from x = -16.64 down.
SCORING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda x: F.softplus(x).sqrt(),
    "topk_softmax": lambda x: x,
}


def _largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [.., k] of the largest of the last axis in falling order; of equals the lowest index first (torch.topk
    promises no order)."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]


def _mask_groups(choice: torch.Tensor, groups: int, kept: int, group_top: int) -> torch.Tensor:
    """`choice` [T, E] with -inf outside the `kept` groups whose `group_top` largest entries sum highest."""
    per_group = choice.view(choice.shape[0], groups, -1)
    best = _largest(per_group.topk(group_top, -1).values.sum(-1), kept)
    keep = torch.zeros(per_group.shape[:2], dtype=torch.bool, device=choice.device).scatter(1, best, True)
    return per_group.masked_fill(~keep[..., None], float("-inf")).view_as(choice)


def check(experts: int, top_k: int, scoring: str, groups: int, top_groups: int, group_top: int) -> None:
    """Raise UsageError for an unknown scoring and for groups or a top_k that do not fit the experts."""
    if scoring not in SCORING:
        near = difflib.get_close_matches(scoring, SCORING, 1)
        why = f"did you mean '{near[0]}'?" if near else f"the known ones are {', '.join(SCORING)}"
        raise UsageError(f"no router scoring is called '{scoring}'", why, "dz ops show router", code="unknown_scoring")
    if experts % groups or not 1 <= top_groups <= groups or not 1 <= group_top <= experts // groups:
        raise UsageError(
            f"{experts} experts in {groups} groups, {top_groups} kept by their best {group_top}",
            "the groups do not divide the experts, or too few remain",
            "check the config",
            code="bad_argument",
        )
    if not 1 <= top_k <= experts // groups * top_groups:
        raise UsageError(
            f"top {top_k} of {experts // groups * top_groups} experts",
            "there are not as many",
            "check the config",
            code="bad_argument",
        )


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_top: int = 2,
    renormalise: bool = False,
    scale: float = 1.0,
    eps: float = 1e-20,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32 [T, K], experts int64 [T, K]); x [T, D] and the gate's weight [E, D], or logits x [T, E] alone.

    Everything is fp32: logits in bfloat16 flip experts. `scores = scoring(logits + bias)`; experts are the top_k of
    `scores + correction` [E] in falling order (ties: lowest index), among the `top_groups` groups with the largest sum
    of their `group_top` best; weights are the scores without correction, divided by `sum + eps` if `renormalise`, times
    `scale`. "topk_softmax" ranks the logits and takes the softmax over the chosen ones. `chosen` [T, K] fixes the
    experts (hash routing). Raises UsageError for an unknown scoring and for groups that do not fit."""
    logits = wide(x) if weight is None else wide(x) @ wide(weight).T
    if bias is not None:
        logits = logits + wide(bias)
    check(logits.shape[-1], top_k, scoring, groups, top_groups, group_top if groups > 1 else 1)
    scores = SCORING[scoring](logits)
    if chosen is None:
        choice = scores if correction is None else scores + wide(correction)
        if groups > 1:
            choice = _mask_groups(choice, groups, top_groups, group_top)
        chosen = _largest(choice, top_k)
    if chosen.shape != (x.shape[0], top_k):
        raise UsageError(
            f"chosen experts of shape {list(chosen.shape)}",
            f"top {top_k} of {x.shape[0]} tokens was asked",
            "check the table",
            code="bad_shape",
        )
    picked = scores.gather(-1, chosen.long())
    if scoring == "topk_softmax":
        picked = torch.softmax(picked, -1)
    if renormalise:
        picked = picked / (picked.sum(-1, keepdim=True) + eps)
    return picked * scale, chosen.long()


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: each scoring, ties, groups, biases too close for bfloat16, underflow, fixed choice, one token, none."""
    m = Maker(dtype, device, seed)

    def gate(tokens: int, experts: int, dim: int = 24) -> dict:
        return {"x": m.normal(tokens, dim), "weight": m.normal(experts, dim, scale=dim**-0.5)}

    yield Case("softmax_t7_e12_k3", {**gate(7, 12), "top_k": 3})
    yield Case("softmax_renormalised_all", {**gate(5, 4), "top_k": 4, "renormalise": True})
    yield Case("topk_softmax_bias", {**gate(9, 8), "top_k": 2, "scoring": "topk_softmax", "bias": m.normal(8)})
    band = (6.817 + 0.246 * torch.rand(238, generator=m.generator)).to(device)
    narrow = {"top_k": 8, "scoring": "sigmoid", "correction": band, "renormalise": True, "scale": 2.5}
    yield Case("sigmoid_e238_narrow_correction", {**gate(33, 238), **narrow})
    grouped = {"top_k": 3, "scoring": "sigmoid", "groups": 4, "top_groups": 2, "renormalise": True, "scale": 2.5}
    below = m.normal(16, shift=-1.5, dtype="float32")
    yield Case("sigmoid_groups4of2_negative_choice", {**gate(17, 16), **grouped, "correction": below})
    yield Case("softmax_groups3_max", {**gate(6, 9), "top_k": 2, "groups": 3, "top_groups": 1, "group_top": 1})
    low = m.tensor([[-17.0, -50.0, 100.0, -200.0], [-17.0, -50.0, -30.0, -200.0], [-200.0] * 4], "float32")
    yield Case(
        "sqrt_softplus_underflow", {"x": low, "top_k": 2, "scoring": "sqrt_softplus", "renormalise": True, "scale": 1.5}
    )
    yield Case("sqrt_softplus_t4", {**gate(4, 10), "top_k": 6, "scoring": "sqrt_softplus", "renormalise": True})
    ties = m.tensor([[0.0] * 9, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]], "float32")
    yield Case("ties", {"x": ties, "top_k": 4, "scoring": "sigmoid"})
    yield Case(
        "ties_between_groups", {"x": ties[:1, :8], "top_k": 3, "groups": 4, "top_groups": 2, "scoring": "sigmoid"}
    )
    fixed = m.tensor([[3, 0], [3, 5], [1, 1]])
    yield Case("chosen", {**gate(3, 6), "top_k": 2, "scoring": "sqrt_softplus", "chosen": fixed, "renormalise": True})
    yield Case("one_token", {**gate(1, 5), "top_k": 1, "scale": 1.5})
    yield Case("no_tokens", {**gate(0, 5), "top_k": 2, "renormalise": True})
    strided = {"x": m.normal(6, 48)[:, ::2], "weight": m.normal(24, 32).t(), "top_k": 16, "renormalise": True}
    yield Case("strided_t6_e32_k16", strided)


OP = Op(
    name="router",
    summary="expert routing: scores, choice, weights",
    reference=reference,
    # fp32 inside whatever the storage dtype: the logits of bfloat16 activations are exact sums in fp32
    tolerance=dict.fromkeys(("float32", "float16", "bfloat16"), REDUCTION["float32"]),
    inputs=inputs,
    recognise=recognise,
    source="arXiv:2412.19437 (groups and correction)",
)
