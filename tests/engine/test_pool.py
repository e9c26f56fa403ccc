"""Blocks and slots: nothing is given twice, a request gets all it asked for or nothing, everything comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dz.engine.cache.pool import Admission, Pool


class Blocks(RuleBasedStateMachine):
    """A pool against a model of it: a set of what is out."""

    def __init__(self):
        super().__init__()
        self.pool, self.out = Pool(17), []

    @rule(n=st.integers(0, 20))
    def take(self, n):
        free = self.pool.free
        got = self.pool.take(n)
        if n > free:
            assert got is None
            assert self.pool.free == free
        else:
            assert len(got) == n
            held = {x for group in self.out for x in group}
            assert not held & set(got)
            assert len(set(got)) == n
            assert all(0 <= x < 17 for x in got)
            self.out.append(got)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give(self, data):
        self.pool.give(self.out.pop(data.draw(st.integers(0, len(self.out) - 1))))

    @invariant()
    def counted(self):
        held = sum(map(len, self.out))
        assert (self.pool.used, self.pool.free) == (held, 17 - held)


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_giving_back_what_is_not_out():
    pool = Pool(3)
    with pytest.raises(KeyError):
        pool.give([1])
    taken = pool.take(2)
    pool.give(taken)
    with pytest.raises(KeyError):
        pool.give(taken)
    assert pool.free == 3


def test_a_lone_sequence_is_contiguous():
    """Low numbers first: a sequence that grows alone can be read without a copy, also after others have gone."""
    a = Admission(blocks=8, block_size=4, slots=2)
    first, second = [], []
    slot = a.grow(first, None, 9)
    other = a.grow(second, None, 4)
    assert (first, second, other) == ([0, 1, 2], [3], 1)
    a.release(second, other)
    assert a.grow(first, slot, 17) == slot
    assert first == [0, 1, 2, 3, 4]


@given(
    blocks=st.integers(1, 9),
    size=st.integers(1, 5),
    slots=st.integers(1, 4),
    asks=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=25),
)
@settings(max_examples=150, deadline=None)
def test_grow_is_all_or_nothing(blocks, size, slots, asks):
    a = Admission(blocks=blocks, block_size=size, slots=slots)
    held = {}
    for who, tokens in asks:
        mine, slot = held.get(who, ([], None))
        before = (list(mine), a.blocks.used, a.slots.used)
        got = a.grow(mine, slot, tokens)
        need = -(-tokens // size)
        if got is None:
            assert (mine, a.blocks.used, a.slots.used) == before
            assert need - len(mine) > blocks - a.blocks.used or (slot is None and a.slots.used == slots)
        else:
            assert len(mine) == max(need, len(before[0]))
            assert mine[: len(before[0])] == before[0]
            assert slot in (None, got)
            held[who] = (mine, got)
        everything = [b for m, _ in held.values() for b in m]
        assert len(everything) == len(set(everything)) == a.blocks.used
        assert len({s for _, s in held.values()}) == len(held) == a.slots.used
    for mine, slot in held.values():
        a.release(mine, slot)
        assert mine == []
    assert (a.blocks.used, a.slots.used) == (0, 0)


def test_a_missing_slot_takes_no_blocks():
    a = Admission(blocks=8, block_size=4, slots=1)
    assert a.grow([], None, 4) == 0
    late = []
    assert a.grow(late, None, 4) is None
    assert (late, a.blocks.used) == ([], 1)
