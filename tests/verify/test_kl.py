"""KL from incomplete lists: a lower bound that is exact when nothing is missing; Jensen-Shannon from both sides."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dz.verify.kl import Gap, gap, summarise

weights = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=9)


def logs(values):
    total = math.fsum(values)
    return {i: math.log(v / total) for i, v in enumerate(values)}


def best(logprobs, k):
    return dict(sorted(logprobs.items(), key=lambda kv: -kv[1])[:k])


def true_kl(p, q):
    return math.fsum(math.exp(p[t]) * (p[t] - q[t]) for t in p)


def true_js(p, q):
    m = {t: math.log((math.exp(p[t]) + math.exp(q[t])) / 2) for t in p}
    return (true_kl(p, m) + true_kl(q, m)) / 2


@given(weights, st.data())
def test_bounds_hold_for_every_cut(values, data):
    other = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(values), max_size=len(values)))
    p, q = logs(values), logs(other)
    kp, kq = data.draw(st.integers(1, len(values))), data.draw(st.integers(1, len(values)))
    top_p, top_q = best(p, kp), best(q, kq)
    if not top_p.keys() & top_q.keys():
        with pytest.raises(ValueError, match="no common token"):
            gap(top_p, top_q)
        return
    found = gap(top_p, top_q)
    assert found.kl <= true_kl(p, q) + 1e-9
    assert found.js_low - 1e-9 <= true_js(p, q) <= found.js_high + 1e-9


@given(weights, st.data())
def test_exact_when_nothing_is_missing(values, data):
    other = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(values), max_size=len(values)))
    p, q = logs(values), logs(other)
    found = gap(p, q)
    assert found.kl == pytest.approx(true_kl(p, q), abs=1e-9)
    assert found.js_low == pytest.approx(true_js(p, q), abs=1e-9)
    assert found.js_high == pytest.approx(true_js(p, q), abs=1e-9)


def test_zero_for_equal_lists_whatever_is_missing():
    p = best(logs([5, 4, 3, 2, 1]), 2)
    found = gap(p, dict(p))
    assert found.kl == 0.0 and found.max_diff == 0.0 and found.top1
    assert found.missing_p == pytest.approx(6 / 15)


def test_a_shifted_rest_counts():
    """Mass that wandered out of the shared tokens is seen in the rest's own term."""
    p, q = {0: math.log(0.5), 1: math.log(0.4)}, {0: math.log(0.05), 1: math.log(0.04)}
    assert gap(p, q).kl > 1.0


def test_top1_and_difference():
    found = gap({1: math.log(0.6), 2: math.log(0.4)}, {1: math.log(0.3), 2: math.log(0.7)})
    assert not found.top1 and found.max_diff == pytest.approx(math.log(2))
    assert gap({1: 0.0, 2: -math.inf}, {1: 0.0, 2: -math.inf}).max_diff == 0.0


@pytest.mark.parametrize("bad", [{}, {1: math.nan}, {1: 0.5}])
def test_what_is_no_distribution_is_refused(bad):
    with pytest.raises(ValueError, match=r"names no token|log probability"):
        gap({1: 0.0}, bad)


def row(kl=0.0, top1=True, missing=0.0):
    return Gap(kl=kl, js_low=0, js_high=kl, missing_p=missing, missing_q=0, shared=3, max_diff=kl, top1=top1)


def test_summary_counts_ties_apart():
    rows = [row(0.1), row(0.3, top1=False), row(0.2, top1=False, missing=0.5)]
    found = summarise(rows, [1.0, 1e-5, 2.0], tie=1e-3)
    assert (found.n, found.ties, found.top1) == (3, 1, 0.5)
    assert found.kl_mean == pytest.approx(0.2) and found.kl_max == 0.3 and found.missing == 0.5
    assert summarise([row(top1=False)], [0.0], tie=1e-3).top1 == 1.0


def test_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="0 positions"):
        summarise([], [], tie=1)
    with pytest.raises(ValueError, match="1 positions with 0"):
        summarise([row()], [], tie=1)
