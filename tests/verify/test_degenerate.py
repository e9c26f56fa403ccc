"""Collapsed output is recognised, varied output and short answers are not."""

import random

import pytest

from dz.verify.degenerate import measure, worse

VARIED = random.Random(0).choices(range(50), k=64)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([], "nothing"),
        ([7] * 8, "one token 8 times"),
        ([1, 2, 3, 9] + [4, 5] * 20, "a loop of 2 tokens"),
        (VARIED[:16] + [1, 2, 3, 4, 5, 6, 7] * 8, "a loop of 7 tokens"),
        ([3] * 6 + [1] + [3] * 20 + [2] + [3] * 6, "bits per token"),
    ],
)
def test_degenerate(tokens, why):
    assert why in measure(tokens).degenerate


@pytest.mark.parametrize(
    "tokens",
    [
        VARIED,
        [5] * 7,  # too short to say
        VARIED[:40] + [1, 2] * 8,  # loops at the very end only
        [1, 2, 3, 4, 5, 6, 7, 8, 9] * 7,  # a long period: a list, a poem
    ],
)
def test_not_degenerate(tokens):
    assert measure(tokens).degenerate == ""


def test_statistics():
    found = measure([1, 1, 1, 2])
    assert (found.n, found.distinct, found.run) == (4, 2, 3)
    assert found.entropy == pytest.approx(0.8112781)
    assert measure([0, 1, 2, 3]).entropy == 2.0


def test_only_what_upstream_does_not_do_counts():
    good, bad = measure(VARIED), measure([4] * 30)
    assert worse([good, bad, bad], [good, bad, good]) == [(2, "one token 30 times")]
