"""Tables: alignment, wrapping, wide characters."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dz.cli import tables


def render(columns, rows, width=None, color=False) -> list[str]:
    return tables.render(columns, rows, width=width, color=color).splitlines()


def test_numbers_stand_right_and_words_left():
    assert render(("NAME", "N", "WHY"), [("a", 1, "x"), ("long", 20, "y")]) == [
        "NAME   N  WHY",
        "a      1  x",
        "long  20  y",
    ]


def test_a_last_column_of_numbers():
    assert render(("A", "BYTES"), [("x", 1), ("y", 12345678)]) == ["A     BYTES", "x         1", "y  12345678"]


def test_cells():
    assert render(("A",), [(None,), (True,), (False,), ("a\n  b",)])[1:] == ["-", "yes", "no", "a b"]
    assert render(("A", "B"), [(0.123456789, ""), (None, "")])[1:] == ["0.1235", "     -"]


def test_no_rows():
    assert render(("A", "B"), []) == ["A  B"]


def test_a_row_that_does_not_fit_is_a_defect():
    with pytest.raises(ValueError, match="3 cells in a table of 2"):
        render(("A", "B"), [(1, 2, 3)])


def test_wide_characters_keep_the_columns():
    got = render(("A", "B"), [("模型", "x"), ("abc", "y")])
    assert [tables.cells(line[: line.index(c)]) for line, c in zip(got, "Bxy", strict=True)] == [6, 6, 6]


def test_the_last_column_wraps_on_a_terminal_only():
    rows = [("a", "one two three four five six seven")]
    assert len(render(("A", "B"), rows)) == 2
    got = render(("A", "B"), rows, width=30)
    assert got == ["A  B", "a  one two three four five six", "   seven"]


def test_colour_changes_nothing_else():
    rows = [("PASS", 1, "x"), ("FAIL", 22, "known")]
    bare = tables.render(("S", "N", "W"), rows, width=None, color=False)
    colored = tables.render(("S", "N", "W"), rows, width=None, color=True)
    assert colored != bare
    assert [line.rstrip() for line in re.sub(r"\x1b\[\d+m", "", colored).splitlines()] == bare.splitlines()


word = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=12)


@given(st.lists(st.tuples(word, st.integers(), word), min_size=1, max_size=8), st.integers(1, 60) | st.none())
def test_nothing_is_lost(rows, width):
    text = tables.render(("A", "B", "C"), rows, width=width, color=False)
    flat = "".join(text.split())
    for a, n, c in rows:
        assert "".join(a.split()) in flat and str(n) in flat and "".join(c.split()) in flat
