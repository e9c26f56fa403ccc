"""Tier isolate: each token mixer runs per sequence with upstream's own cache object, everything else on packed tokens.

What a mixer gets for a sequence is what upstream's decoder would have handed to that layer for that sequence alone
(recorded beforehand with layers stood in for), so masks, rotary tables and tables by layer type are upstream's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dz.engine.mixers.taps import Call, Learn, Record, Taps
from dz.upstream.decoder import Decoder


class NotIsolatable(Exception):
    """This decoder hands its mixers something that cannot be split by sequence; the message says what."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a step: `ids` [1, n], `positions` [1, n] or [R, 1, n], upstream's `cache`."""

    cache: Any
    ids: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class PerSequence:
    """A value that differs by sequence and cannot be one tensor; layers pass it on, mixers get their own item."""

    items: tuple[Any, ...]


class Isolate:
    """Runs steps of several sequences. `learn` must have seen one real forward."""

    def __init__(self, decoder: Decoder, taps: Taps, learn: Learn) -> None:
        self.decoder, self.taps, self.learn = decoder, taps, learn

    def run(self, segments: list[Segment]) -> torch.Tensor:
        """Hidden states [1, T, D] of all segments in their order."""
        if len(segments) == 1:
            s = segments[0]
            with self.taps.using(None):
                return self.decoder(cache=s.cache, positions=s.positions, ids=s.ids)
        records = [self._record(s) for s in segments]
        total = sum(s.ids.shape[1] for s in segments)
        ids = torch.cat([s.ids for s in segments], 1)
        positions = torch.cat([s.positions for s in segments], -1)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device).expand(1, 1, total, total)
        cache = self.decoder.new_cache()
        with self.taps.using(_Split(segments, records, cache, total)):
            return self.decoder(cache=cache, positions=positions, ids=ids, mask=mask)

    def _record(self, s: Segment) -> Record:
        record = Record(self.learn.forms)
        with self.taps.using(record):
            self.decoder(cache=s.cache, positions=s.positions, ids=s.ids)
        return record


_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)  # the same for all


class _Split:
    """The handler of a packed step."""

    def __init__(self, segments: list[Segment], records: list[Record], cache: Any, total: int) -> None:
        self.segments, self.records, self.cache, self.total = segments, records, cache, total
        self.starts = [0]
        for s in segments:
            self.starts.append(self.starts[-1] + s.ids.shape[1])
        self.produced: dict[int, Any] = {}
        self.known: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self.at = 0

    def layer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """Mark every argument, so that a mixer's arguments can be traced to it whatever the layer renames."""
        self.at = index
        self.known = {}
        return call(hidden, {name: self._mark(value, (name,)) for name, value in named.items()})

    def mixer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """Run the mixer once per sequence and join its outputs."""
        outs = []
        for i in range(len(self.segments)):
            mine = {name: self._of(i, value) for name, value in named.items()}
            outs.append(call(self._of(i, hidden), mine))
        return self._join(outs)

    def _mark(self, value: Any, path: tuple[Any, ...]) -> Any:
        if value is self.cache or isinstance(value, (PerSequence, *_PLAIN)) or id(value) in self.produced:
            return value
        if isinstance(value, torch.Tensor):
            value = value.view_as(value)  # an object of its own: one mask may be passed under two names
        elif isinstance(value, (tuple, list)):
            value = type(value)(self._mark(v, (*path, k)) for k, v in enumerate(value))
        elif isinstance(value, dict) and value:
            value = {k: self._mark(v, (*path, k)) for k, v in value.items()}
        self.known[id(value)] = (value, path)
        return value

    def _of(self, i: int, value: Any) -> Any:
        if value is self.cache:
            return self.segments[i].cache
        if isinstance(value, PerSequence):
            return value.items[i]
        if id(value) in self.known:
            return self._recorded(i, self.known[id(value)][1])
        if isinstance(value, torch.Tensor):
            return self._cut(i, value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._of(i, v) for v in value)
        if isinstance(value, dict):
            return {k: self._of(i, v) for k, v in value.items()}
        return value

    def _recorded(self, i: int, path: tuple[Any, ...]) -> Any:
        value: Any = self.records[i].named[self.at]
        try:
            for step in path:
                value = value[step]
        except (KeyError, IndexError, TypeError):
            raise NotIsolatable(f"layer {self.at} gets {'.'.join(map(str, path))} in a batch but not alone") from None
        return value

    def _cut(self, i: int, value: torch.Tensor) -> torch.Tensor:
        start, end = self.starts[i], self.starts[i + 1]
        dims = [d for d in range(1, value.dim()) if value.shape[d] == self.total]
        if not dims and value.dim() in (1, 2) and value.shape[0] == self.total:
            dims = [0]
        return value.narrow(dims[0], start, end - start) if dims else value

    def _join(self, outs: list[Any]) -> Any:
        first = outs[0]
        if isinstance(first, (tuple, list)):
            return type(first)(self._join(list(column)) for column in zip(*outs, strict=True))
        if isinstance(first, torch.Tensor) and self._aligned(outs):
            joined = torch.cat(outs, 1)
            self.produced[id(joined)] = joined
            return joined
        if all(o is first or o is None for o in outs):
            return first
        return PerSequence(tuple(outs))

    def _aligned(self, outs: list[Any]) -> bool:
        lengths = [self.starts[i + 1] - self.starts[i] for i in range(len(outs))]
        return all(
            isinstance(o, torch.Tensor) and o.dim() >= 2 and o.shape[1] == n and o.shape[2:] == outs[0].shape[2:]
            for o, n in zip(outs, lengths, strict=True)
        )


def serial(decoder: Decoder, taps: Taps, segments: list[Segment]) -> torch.Tensor:
    """One upstream forward per sequence: exact by construction, the oracle of the tiers."""
    return torch.cat(list(_alone(decoder, taps, segments)), 1)


def _alone(decoder: Decoder, taps: Taps, segments: list[Segment]) -> Iterator[torch.Tensor]:
    for s in segments:
        with taps.using(None):
            yield decoder(cache=s.cache, positions=s.positions, ids=s.ids)
