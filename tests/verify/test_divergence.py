"""The first difference decides, and a near tie is no error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dz.verify.divergence import compare, first_difference, summarise
from dz.verify.ties import margin, tie_margin

tokens = st.lists(st.integers(0, 5), max_size=12)


@given(tokens)
def test_equal_is_exact(want):
    found = compare(want, list(want), margins=[0.0] * len(want), tie=1.0)
    assert (found.verdict, found.at, found.matched) == ("exact", None, len(want))


@given(tokens, tokens)
def test_the_first_difference_is_the_first(want, got):
    at = first_difference(want, got)
    if at is None:
        assert want == got
    else:
        assert want[:at] == got[:at] and want[at : at + 1] != got[at : at + 1]


@pytest.mark.parametrize(("third", "verdict"), [(0.5, "differs"), (1e-3, "differs"), (9e-4, "tie")])
def test_a_tie_is_decided_by_the_margin_where_they_part(third, verdict):
    found = compare([1, 2, 3, 4], [1, 2, 9, 4], margins=[1e-9, 1e-9, third, 1e-9], tie=1e-3)
    assert (found.verdict, found.at, found.want, found.got, found.matched) == (verdict, 2, 3, 9, 2)


def test_ending_early_or_late_is_a_difference():
    early = compare([1, 2, 3], [1, 2], margins=[1, 1, 0.2], tie=0.1)
    assert (early.verdict, early.want, early.got, early.margin) == ("differs", 3, None, 0.2)
    late = compare([1, 2], [1, 2, 3], margins=[1, 1, 5e-5], tie=1e-3)  # the third margin is that of the end token
    assert (late.verdict, late.want, late.got) == ("tie", None, 3)


def test_without_a_margin_nothing_is_a_tie():
    assert compare([1], [2], tie=1e9).verdict == "differs"


def test_words():
    assert compare([1, 2], [1, 5], margins=[1.0, 0.25], tie=0).text() == "token 1: 5 instead of 2, margin 0.25"
    assert compare([1], [], tie=0).text() == "token 0: the end instead of 1"
    assert compare([7, 7], [7, 7]).text() == "2 tokens equal"


def test_counting():
    rows = [
        compare([1, 2, 3], [1, 2, 3]),
        compare([1, 2, 3], [1, 9, 3], margins=[1, 1e-5, 1], tie=1e-3),
        compare([1, 2, 3], [1, 2, 9], margins=[1, 1, 1], tie=1e-3),
    ]
    total = summarise(rows)
    assert (total.n, total.exact, total.ties, total.differs) == (3, 1, 1, 1)
    assert (total.matched, total.compared, total.share) == (6, 7, 6 / 7)
    assert summarise([]).share == 0.0


def test_tie_margins_follow_the_dtype():
    assert tie_margin("float32") == 1e-3
    assert tie_margin("bfloat16") == 0.125 and tie_margin("float16") == 2**-6
    with pytest.raises(KeyError):
        tie_margin("int8")


def test_margin():
    assert margin([-3.0, -1.0, -1.5]) == 0.5
    assert margin([-1.0]) == margin([]) == 0.0
