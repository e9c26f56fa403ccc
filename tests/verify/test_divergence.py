import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dz.verify.divergence import degenerate, kl_bounds


def top(logits, k):
    best = torch.log_softmax(logits, -1).topk(k)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(0.0, 3.0))
def test_bounds_hold_the_true_divergence(seed, k, scale):
    random = torch.Generator().manual_seed(seed)
    p = torch.randn(12, generator=random, dtype=torch.float64) * 2
    q = p + scale * torch.randn(12, generator=random, dtype=torch.float64)
    true = float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum())
    low, high = kl_bounds(top(p, k), top(q, k))
    assert low <= true + 1e-6
    assert high >= true - 1e-6


def test_equal_lists_are_at_distance_zero_and_full_lists_are_exact():
    p = torch.tensor([2.0, 1.0, 0.0])
    q = torch.tensor([0.0, 1.0, 2.0])
    assert kl_bounds(top(p, 3), top(p, 3)) == (0.0, 0.0)
    low, high = kl_bounds(top(p, 3), top(q, 3))
    assert math.isclose(low, high) and low > 0.5


def test_degenerate_outputs_are_named():
    assert degenerate([7] * 24).reason == "one token 24 times in a row"
    assert "pattern of 3" in (degenerate([*range(10, 34), *([1, 2, 3] * 8)]).reason or "")
    assert degenerate(list(range(40))).reason is None
    assert degenerate([7] * 8).reason is None
