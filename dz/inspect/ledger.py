"""Every byte of a checkpoint by op, format and how it can be split, from headers and a configuration alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from dz.core.headers import TensorInfo
from dz.inspect.outline import Outline
from dz.weights.families import FAMILIES, Recognised

Split = Literal["experts", "matrix", "whole"]
_FEW = 3  # a numbered list of more members than these is one of experts where no configuration says how many
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
    """Weights alike: one glob, format and logical shape. `at` are the numbers in their names, one tuple a weight;
    `plain` tells a tensor as it stands in the files from a quantised weight."""

    glob: str
    format: str
    shape: tuple[int, ...]
    plain: bool = True
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

    def name(self, at: tuple[int, ...]) -> str:
        """The name of the weight with these numbers."""
        pieces = self.glob.split("*")
        return pieces[0] + "".join(f"{n}{piece}" for n, piece in zip(at, pieces[1:], strict=True))

    def divided(self, groups: Mapping[str, list[tuple[int, ...]]]) -> Iterator[tuple[Kind, str]]:
        """The kind in parts, with the label of each; tensors and bytes are shared out by number."""
        left, tensors, size = len(self.at), self.tensors, self.bytes
        for label, at in groups.items():
            share = Kind(
                self.glob, self.format, self.shape, self.plain, tensors * len(at) // left, size * len(at) // left, at
            )
            left, tensors, size = left - len(at), tensors - share.tensors, size - share.bytes
            yield share, label


def kinds(headers: Mapping[str, TensorInfo], found: Recognised) -> list[Kind]:
    """All weights of a checkpoint, alike ones together, in the order of their first."""
    out: dict[Any, Kind] = {}
    for name, format_, shape, tensors, size in _units(headers, found):
        numbers = tuple(int(n) for n in _NUMBER.findall(name))
        glob = _NUMBER.sub("*", name) if numbers else name
        key = (glob, format_, shape)
        kind = out.get(key)
        if kind is None:
            kind = out[key] = Kind(glob, format_, shape, plain=format_ not in FAMILIES)
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


def ledger(headers: Mapping[str, TensorInfo], structure: Structure) -> Ledger:
    """The ledger of a checkpoint of which no class is known. Ops are told by structure: numbered lists, shapes, and
    only then by the words that names usually hold, so that a checkpoint under other names adds up as well."""
    named = [(k, *structure.op(k)) for k in structure.kinds]
    layers = {at[0] for k in structure.kinds if structure.inside(k) for at in k.at}
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


class Structure:
    """What lies where in a checkpoint, by names' numbers and by shapes. `kinds` are all weights, alike ones together;
    `experts` is the number of routed experts of a layer."""

    def __init__(self, headers: Mapping[str, TensorInfo], found: Recognised, shape: Outline) -> None:
        self.kinds = kinds(headers, found)
        self.shape = shape
        self.experts = shape.expert_count
        self._stem = _decoder(self.kinds)
        self._lists = _lists(self.kinds, self._stem)
        router = (self.experts, shape.hidden)
        self._routers = {_parent(k.glob) for k in self.kinds if k.shape == router}
        if not self.experts:
            self.experts = max((n for n in self._lists.values() if n > _FEW), default=0)
        self._tables = self._name_tables()

    def inside(self, k: Kind) -> bool:
        """Whether weights lie in the decoder's layers."""
        return _inside(k, self._stem)

    def expert_list(self, k: Kind) -> bool:
        """Whether weights are members of a layer's numbered list of experts."""
        if len(k.at[0]) < 2 or not self.inside(k):
            return False
        return self._lists["*".join(k.glob.split("*")[:2])] == self.experts > 0

    def by_expert(self, k: Kind) -> bool:
        """Whether the first axis of weights counts experts."""
        return self._stacked(k) or (k.shape[:1] == (self.experts,) and _parent(k.glob) in self._routers)

    def split(self, k: Kind) -> Split:
        """How many devices share weights."""
        return self.op(k)[1]

    def op(self, k: Kind) -> tuple[str, Split]:
        """(op, split) of weights alike."""
        if self.expert_list(k) or self._stacked(k):
            return "experts", "experts"
        if sum(d > 1 for d in k.shape) < 2:
            return self._vector(k)
        if len(k.shape) == 3 and k.shape[1] == 1:
            return "causal_conv", "matrix"
        if k.glob in self._tables:
            return self._tables[k.glob], "matrix"
        if k.shape == (self.experts, self.shape.hidden):
            return "router", "matrix"
        return ("linear" if len(k.shape) == 2 else "other"), "matrix"

    def _stacked(self, k: Kind) -> bool:
        """Weights of all experts of a layer in one tensor."""
        if self.experts < 2 or not self.inside(k) or len(k.shape) < 2 or k.shape[0] != self.experts:
            return False
        return (len(k.shape) == 3 and k.shape[1] > 1) or "expert" in k.glob

    def _vector(self, k: Kind) -> tuple[str, Split]:
        if k.shape == (self.experts,) and _parent(k.glob) in self._routers:
            return "router", "whole"
        leaf = k.glob.lower().split("*")[-1]
        return ("norm" if "norm" in leaf or "ln_" in leaf else "vector"), "whole"

    def _name_tables(self) -> dict[str, str]:
        """Embedding and head: by the words of their names, else the first in the files is the embedding."""
        size = (self.shape.vocab, self.shape.hidden)
        globs = [k.glob for k in self.kinds if not self.inside(k) and k.shape == size]
        rest = [g for g in globs if "emb" not in g.lower() and "wte" not in g.lower() and "head" not in g.lower()]
        out = {g: "lm_head" if "head" in g.lower() else "embedding" for g in globs if g not in rest}
        for g in rest:
            out[g] = "lm_head" if "embedding" in out.values() else "embedding"
        return out
