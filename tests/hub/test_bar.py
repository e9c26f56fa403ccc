"""The bar that the hub client is given."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.hub.bar import Stopped, bar_class


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.lists(st.integers(-20, 50), max_size=5)), max_size=4))
def test_each_byte_counts_once_however_often_a_transfer_starts_over(transfers):
    """Every transfer of the file gets a new bar, which starts at what is on disk and may be rolled back."""
    told: list[int] = []
    bar = bar_class(told.append, threading.Event())
    highest = 0
    for initial, steps in transfers:
        with bar(initial=initial, total=100, unit="B", desc="x") as b:
            at = initial
            highest = max(highest, at)
            for n in steps:
                b.update(n)
                b.update_transfer(n)
                at += n
                highest = max(highest, at)
    assert sum(told) == highest and all(n > 0 for n in told)


def test_the_client_may_call_the_rest_of_tqdm():
    bar = bar_class(lambda n: None, threading.Event())()
    bar.set_postfix_str("1 MB/s", refresh=False)
    bar.set_transfer_postfix_str("1 MB/s", refresh=False)
    bar.set_description("x")
    bar.refresh()
    bar.close()


def test_it_ends_a_transfer_that_was_told_to_stop():
    stop = threading.Event()
    bar = bar_class(lambda n: None, stop)()
    bar.update(1)
    stop.set()
    with pytest.raises(Stopped):
        bar.update(1)
