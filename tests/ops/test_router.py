"""Routing: scorings, groups, corrections that need fp32, ties, underflow."""

import pytest
import torch

from dz.core.op import Case
from dz.errors import UsageError
from dz.ops.router import inputs, reference

CASES: dict[str, Case] = {c.id: c for c in inputs("float32", "cpu", 0)}


def grouped_by_hand(x, weight, correction, *, top_k, groups, top_groups, scale):
    """Written from arXiv:2412.19437, one token at a time."""
    out = []
    for row in (x.double() @ weight.double().T).sigmoid():
        choice = row + correction.double()
        size = len(row) // groups
        best = [sum(sorted(choice[g * size : (g + 1) * size].tolist())[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -best[g])[:top_groups]
        experts = [e for e in range(len(row)) if e // size in kept]
        chosen = sorted(experts, key=lambda e: -choice[e])[:top_k]
        weights = row[chosen]
        out.append((weights / weights.sum() * scale, chosen))
    return torch.stack([w for w, _ in out]), torch.tensor([c for _, c in out])


def test_groups_against_a_loop():
    args = dict(CASES["sigmoid_groups4of2_negative_choice"].args)
    weights, experts = reference(**args)
    keep = {k: args[k] for k in ("top_k", "groups", "top_groups", "scale")}
    want, chosen = grouped_by_hand(args["x"], args["weight"], args["correction"], **keep)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)
    ungrouped = reference(**{**args, "groups": 1, "top_groups": 1})[1]
    assert not torch.equal(ungrouped, experts)


def test_a_bfloat16_correction_would_choose_others():
    args = dict(CASES["sigmoid_e238_narrow_correction"].args)
    experts = reference(**args)[1].sort(-1).values
    rounded = reference(**{**args, "correction": args["correction"].bfloat16()})[1].sort(-1).values
    assert (experts != rounded).any(-1).float().mean() > 0.5


def test_bfloat16_activations_are_scored_in_fp32():
    x, w = torch.randn(64, 32).bfloat16(), torch.randn(96, 32).bfloat16()
    weights, experts = reference(x, w, top_k=4)
    want = torch.softmax(x.double() @ w.double().T, -1).topk(4)
    assert weights.dtype == torch.float32 and torch.equal(experts, want.indices)
    torch.testing.assert_close(weights.double(), want.values, rtol=1e-5, atol=1e-7)


def test_sqrt_softplus_does_not_underflow():
    weights, experts = reference(**CASES["sqrt_softplus_underflow"].args)
    assert weights.isfinite().all() and experts[0].tolist() == [2, 0] and experts[1].tolist() == [0, 2]
    naive = torch.log(1 + torch.exp(torch.tensor(-17.0))).sqrt()
    assert naive == 0 and weights[1, 0] > 1.4
    assert torch.allclose(weights[:2].sum(-1), torch.tensor([1.5, 1.5]))
    assert weights[2].tolist() == [0, 0]


def test_ties_go_to_the_lowest_index():
    assert reference(**CASES["ties"].args)[1].tolist() == [[0, 1, 2, 3], [0, 2, 4, 6]]
    assert reference(**CASES["ties_between_groups"].args)[1].tolist() == [[0, 1, 2]]


def test_topk_softmax_sums_to_one_and_softmax_does_not():
    args = dict(CASES["topk_softmax_bias"].args)
    weights, experts = reference(**args)
    assert torch.allclose(weights.sum(-1), torch.ones(9))
    assert not torch.allclose(reference(**{**args, "scoring": "softmax"})[0].sum(-1), torch.ones(9), atol=1e-2)
    assert not torch.equal(experts, reference(**{**args, "bias": None})[1])


def test_correction_chooses_and_does_not_weigh():
    x = torch.tensor([[2.0, 1.0, 0.0]])
    weights, experts = reference(x, top_k=1, scoring="sigmoid", correction=torch.tensor([0.0, 0.0, 5.0]))
    assert experts.tolist() == [[2]] and weights.tolist() == [[0.5]]


def test_chosen_experts_are_kept():
    args = CASES["chosen"].args
    weights, experts = reference(**args)
    assert torch.equal(experts, args["chosen"]) and weights[2, 0] == weights[2, 1] == 0.5


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"scoring": "made_up"}, "made_up"),
        ({"top_k": 7}, "top 7"),
        ({"groups": 4}, "4 groups"),
        ({"groups": 3, "top_groups": 1, "top_k": 3}, "top 3 of 2"),
        ({"groups": 3, "group_top": 3}, "best 3"),
        ({"chosen": torch.zeros(1, 2, dtype=torch.int64)}, "shape \\[1, 2\\]"),
    ],
)
def test_what_does_not_fit_is_refused(extra, words):
    with pytest.raises(UsageError, match=words):
        reference(torch.zeros(2, 6), **{"top_k": 2, **extra})


def test_an_unknown_scoring_suggests_the_nearest():
    with pytest.raises(UsageError) as e:
        reference(torch.zeros(1, 2), top_k=1, scoring="sqrtsoftplus")
    assert "sqrt_softplus" in e.value.why
