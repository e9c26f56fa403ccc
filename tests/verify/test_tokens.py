from hypothesis import given
from hypothesis import strategies as st

from dz.verify.tokens import compare_tokens


def test_equal_sequences_are_exact():
    found = compare_tokens([1, 2, 3], [1, 2, 3], [1.0, 1.0, 1.0])
    assert (found.kind, found.at, found.matched) == ("exact", None, 3)


def test_a_difference_is_a_tie_only_below_the_margin():
    assert compare_tokens([1, 9, 9], [1, 2, 3], [1.0, 5e-4, 1.0]).kind == "tie"
    far = compare_tokens([1, 9, 9], [1, 2, 3], [5e-4, 2e-3, 5e-4])
    assert (far.kind, far.at, far.margin) == ("differs", 1, 2e-3)


def test_a_text_that_ends_early_differs_even_at_a_tie():
    assert compare_tokens([1], [1, 2], [1.0, 1e-5]).kind == "differs"
    assert compare_tokens([1, 2, 3], [1, 2], [1.0, 1.0]).kind == "differs"


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12))
def test_matched_is_the_common_prefix(got, want):
    found = compare_tokens(got, want, [1.0] * len(want))
    n = found.matched
    assert got[:n] == want[:n]
    assert (found.kind == "exact") == (got == want)
