"""Blocks and state slots under one admission: a request gets both or neither."""

from __future__ import annotations

from collections import deque


class Pool:
    """Numbers that can be taken and given back. `low` numbers go first, so that a lone sequence stays contiguous."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: deque[int] = deque(range(count))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many can be taken now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many are taken."""
        return len(self._taken)

    def take(self, n: int) -> list[int] | None:
        """`n` numbers, or None (and nothing is taken) when there are fewer."""
        if n > len(self._free):
            return None
        out = [self._free.popleft() for _ in range(n)]
        self._taken.update(out)
        return out

    def give(self, numbers: list[int]) -> None:
        """Put numbers back in front, in their order. Giving back what is not taken is a fault of the caller."""
        for n in reversed(numbers):
            self._taken.remove(n)
            self._free.appendleft(n)


class Admission:
    """The block pool (tokens) and the slot pool (sequences). `grow` and `release` are transactions over both."""

    def __init__(self, *, blocks: int, block_size: int, slots: int) -> None:
        self.block_size = block_size
        self.blocks = Pool(blocks)
        self.slots = Pool(slots)

    def needed(self, tokens: int) -> int:
        """Blocks that hold `tokens`."""
        return -(-tokens // self.block_size)

    def grow(self, held: list[int], slot: int | None, tokens: int) -> int | None:
        """Make room for `tokens` of a sequence that holds `held` blocks (extended in place) and maybe a slot.

        Returns its slot, or None when something is short; then nothing has changed."""
        more = max(0, self.needed(tokens) - len(held))
        if more > self.blocks.free or (slot is None and not self.slots.free):
            return None
        if slot is None:
            slot = (self.slots.take(1) or [0])[0]
        held.extend(self.blocks.take(more) or [])
        return slot

    def release(self, held: list[int], slot: int | None) -> None:
        """Give back everything a sequence holds; `held` is emptied."""
        self.blocks.give(held)
        held.clear()
        if slot is not None:
            self.slots.give([slot])
