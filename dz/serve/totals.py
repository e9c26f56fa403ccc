"""The engine's counters over all its lives: a restarted engine counts from zero, the sums do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dz.core.messages import Stats


class Totals:
    """Sums of Stats. `latest` holds the levels of the running engine."""

    def __init__(self) -> None:
        self.latest = Stats()
        self._before: dict[str, Counter] = {}

    def update(self, stats: Stats) -> bool:
        """Take new Stats; True when the engine made a step since the last ones."""
        moved = (stats.steps, stats.step_tokens) != (self.latest.steps, self.latest.step_tokens)
        self.latest = stats
        return moved

    def restart(self) -> None:
        """A new engine counts from zero: keep what the old one had counted."""
        self._before = {name: Counter(self.counts(name)) for name in _COUNTERS}
        self.latest = Stats()

    def counts(self, name: str) -> Mapping:
        """The sums of a field: `steps`, `batch_sizes`, `kernel_calls` by key; `step_tokens`, `preemptions` by ""."""
        value = getattr(self.latest, name)
        out = Counter(value if isinstance(value, dict) else {"": value})
        out.update(self._before.get(name, {}))
        return out


_COUNTERS = ("steps", "batch_sizes", "kernel_calls", "step_tokens", "preemptions")
