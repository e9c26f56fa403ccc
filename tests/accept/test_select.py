"""-k as in pytest, but that a whole name means itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dz.accept.select import expression
from dz.errors import UsageError

NAMES = ["text", "long_context", "image", "batch_invariance"]


def chosen(text):
    return [n for n in NAMES if expression(text, NAMES)(n)]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("text", ["text"]),
        ("tex", ["text", "long_context"]),
        ("IMAGE", ["image"]),
        ("text or image", ["text", "image"]),
        ("not text", ["long_context", "image", "batch_invariance"]),
        ("not (text or image)", ["long_context", "batch_invariance"]),
        ("not text and not image", ["long_context", "batch_invariance"]),
        ("image or batch and long", ["image"]),
        ("(image or batch) and not batch", ["image"]),
        ("not not text", ["text"]),
        ("nothing", []),
    ],
)
def test_expressions(text, want):
    assert chosen(text) == want


@pytest.mark.parametrize("text", ["and", "text or", "(text", "text)", "not", "text image", "()", "or text", ""])
def test_what_cannot_be_read(text):
    with pytest.raises(UsageError, match="cannot be read"):
        expression(text, NAMES)


@given(
    st.text(alphabet="ab ()", max_size=12)
    | st.lists(st.sampled_from(["a", "and", "or", "not", "(", ")"])).map(" ".join)
)
def test_nothing_but_usage_errors(text):
    try:
        test = expression(text, NAMES)
    except UsageError:
        return
    assert isinstance(test("a"), bool)
