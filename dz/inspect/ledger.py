"""Every byte of a checkpoint by op, format and how it can be split, from headers and a configuration alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from dz.core.headers import TensorInfo
from dz.inspect.outline import Outline
from dz.weights.families import FAMILIES, Recognised

Split = Literal["experts", "matrix", "whole"]
_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Tensors of one op in one format: how many, the logical values, the bytes in the files. `split` says what many
    devices do with them: experts are shared out, matrices cut, the rest is whole on each. `where` are name globs."""

    op: str
    format: str
    split: Split
    tensors: int
    values: int
    bytes: int
    where: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """`rows` hold every tensor once; `total` is the headers' own sum. `layer_experts` are the values of the routed
    experts of one layer, the most of any, and `packed_experts` those of them in fewer than eight bits."""

    rows: tuple[Row, ...]
    tensors: int
    total: int
    layers: int
    experts: int
    layer_experts: int
    packed_experts: int
    notes: tuple[str, ...] = ()

    def of(self, split: Split) -> int:
        """Bytes of the rows that are split so."""
        return sum(r.bytes for r in self.rows if r.split == split)

    def values(self, split: Split | None = None) -> int:
        """Logical values of the rows that are split so, or of all."""
        return sum(r.values for r in self.rows if split in (None, r.split))

    @property
    def unaccounted(self) -> int:
        """Bytes of the headers that no row holds."""
        return self.total - sum(r.bytes for r in self.rows)


@dataclass(slots=True)
class Kind:
    """Weights alike: one glob, format and logical shape. `at` are the numbers in their names, one tuple a weight."""

    glob: str
    format: str
    shape: tuple[int, ...]
    tensors: int = 0
    bytes: int = 0
    at: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def each(self) -> int:
        """Logical values of one."""
        return prod(self.shape)

    @property
    def values(self) -> int:
        """Logical values of all."""
        return self.each * len(self.at)


def kinds(headers: Mapping[str, TensorInfo], found: Recognised) -> list[Kind]:
    """All weights of a checkpoint, alike ones together, in the order of their first."""
    out: dict[Any, Kind] = {}
    for name, format_, shape, tensors, size in _units(headers, found):
        numbers = tuple(int(n) for n in _NUMBER.findall(name))
        glob = _NUMBER.sub("*", name) if numbers else name
        kind = out.setdefault((glob, format_, shape), Kind(glob, format_, shape))
        kind.tensors += tensors
        kind.bytes += size
        kind.at.append(numbers)
    return list(out.values())


def _units(
    headers: Mapping[str, TensorInfo], found: Recognised
) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, format, logical shape, tensors, bytes) of each weight; side scales count with their weight."""
    for s in found.stored.values():
        yield s.name, s.family, s.shape, len(s.parts), s.bytes
    for name in found.plain:
        info = headers[name]
        yield name, info.dtype, info.shape, 1, info.bytes


def ledger(headers: Mapping[str, TensorInfo], found: Recognised, shape: Outline) -> Ledger:
    """The ledger of a checkpoint of which no class is known. Ops are told by structure: numbered lists, shapes, and
    only then by the words that names usually hold, so that a checkpoint under other names adds up as well."""
    all_kinds = kinds(headers, found)
    stem = _decoder(all_kinds)
    routers = {_parent(k.glob) for k in all_kinds if k.shape == (shape.expert_count, shape.hidden)}
    reader = _Reader(shape, stem, _lists(all_kinds, stem), routers)
    named = [(k, *reader.op(k)) for k in all_kinds]
    layers = {at[0] for k in all_kinds if _inside(k, stem) for at in k.at}
    return total(named, headers, layers=len(layers))


def total(named: Sequence[tuple[Kind, str, Split]], headers: Mapping[str, TensorInfo], *, layers: int) -> Ledger:
    """The ledger of weights whose op and split are known."""
    rows: dict[tuple[str, str, Split], list[Kind]] = {}
    by_layer: dict[Any, list[int]] = {}
    most = 0
    for k, op, split in named:
        rows.setdefault((op, k.format, split), []).append(k)
        if split == "experts":
            most = max(most, _experts(k))
            packed = k.format in FAMILIES and k.bytes < k.values
            for at in k.at:
                cell = by_layer.setdefault(at[:1], [0, 0])
                cell[0] += k.each
                cell[1] += k.each if packed else 0
    return Ledger(
        rows=tuple(_row(*key, group) for key, group in rows.items()),
        tensors=len(headers),
        total=sum(i.bytes for i in headers.values()),
        layers=layers,
        experts=most,
        layer_experts=max((c[0] for c in by_layer.values()), default=0),
        packed_experts=max((c[1] for c in by_layer.values()), default=0),
    )


def _experts(k: Kind) -> int:
    """How many experts a kind holds a layer: by the second number of the names, else by the first axis."""
    return max(at[1] for at in k.at) + 1 if len(k.at[0]) > 1 else k.shape[0]


def _row(op: str, format_: str, split: Split, group: Iterable[Kind]) -> Row:
    group = list(group)
    return Row(
        op=op,
        format=format_,
        split=split,
        tensors=sum(k.tensors for k in group),
        values=sum(k.values for k in group),
        bytes=sum(k.bytes for k in group),
        where=tuple(dict.fromkeys(k.glob for k in group)),
    )


def _parent(glob: str) -> str:
    return glob.rpartition(".")[0]


def _stem(glob: str) -> str:
    """What stands before the first number."""
    return glob.partition("*")[0]


def _decoder(all_kinds: Iterable[Kind]) -> str:
    """The stem of the numbered list that holds the most bytes: the decoder's layers."""
    sizes: dict[str, int] = {}
    for k in all_kinds:
        if "*" in k.glob:
            sizes[_stem(k.glob)] = sizes.get(_stem(k.glob), 0) + k.bytes
    return max(sizes, key=lambda s: sizes[s], default="")


def _inside(k: Kind, stem: str) -> bool:
    return "*" in k.glob and _stem(k.glob) == stem


def _lists(all_kinds: Iterable[Kind], stem: str) -> dict[str, int]:
    """The numbered lists inside a layer, by what stands before their number, with how many members they have."""
    out: dict[str, int] = {}
    for k in all_kinds:
        if _inside(k, stem) and len(k.at[0]) > 1:
            key = "*".join(k.glob.split("*")[:2])
            out[key] = max(out.get(key, 0), max(at[1] for at in k.at) + 1)
    return out


@dataclass(slots=True)
class _Reader:
    """Tells ops apart. `lists` are the numbered lists inside layers with their lengths, `routers` the names of
    what holds a matrix from the hidden vector to the experts."""

    shape: Outline
    stem: str
    lists: Mapping[str, int]
    routers: Collection[str]
    tables: int = 0

    def op(self, k: Kind) -> tuple[str, Split]:
        """(op, split) of weights alike."""
        words, inside = k.glob.lower(), _inside(k, self.stem)
        if inside and self._expert(k, words):
            return "experts", "experts"
        if sum(d > 1 for d in k.shape) < 2:
            return self._vector(k, words)
        if len(k.shape) == 3 and k.shape[1] == 1:
            return "causal_conv", "matrix"
        if not inside and k.shape == (self.shape.vocab, self.shape.hidden):
            return self._table(words), "matrix"
        if k.shape == (self.shape.expert_count, self.shape.hidden):
            return "router", "matrix"
        return ("linear" if len(k.shape) == 2 else "other"), "matrix"

    def _expert(self, k: Kind, words: str) -> bool:
        count = self.shape.expert_count
        if len(k.at[0]) > 1:
            length = self.lists["*".join(k.glob.split("*")[:2])]
            return length == count if count else length > 3
        return count > 1 and len(k.shape) > 1 and k.shape[0] == count and (len(k.shape) == 3 or "expert" in words)

    def _table(self, words: str) -> str:
        """Embedding or head: by the words of the name, else the first in the files is the embedding."""
        if "emb" in words or "wte" in words:
            return "embedding"
        self.tables += 1
        return "lm_head" if "head" in words or self.tables > 1 else "embedding"

    def _vector(self, k: Kind, words: str) -> tuple[str, Split]:
        if k.shape == (self.shape.expert_count,) and _parent(k.glob) in self.routers:
            return "router", "whole"
        leaf = words.split("*")[-1]
        return ("norm" if "norm" in leaf or "ln_" in leaf else "vector"), "whole"
