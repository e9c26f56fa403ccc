"""What every family of quantised weights answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from dz.core.headers import TensorInfo
from dz.errors import Refused

Parts = Mapping[str, TensorInfo]  # the tensors of one weight by role: the last part of their name


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How one weight is stored: `layout` within the family, its logical `shape` (the last axis is the input unless
    `layout` says otherwise), and the `group` of values that share a scale, an extent for each of the last axes
    (0: the whole axis)."""

    layout: str
    shape: tuple[int, ...]
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a configuration says of a family: its `producer`, the layouts that this producer writes, the group it names
    (None: it names none) and whether activations are quantised with a stored scale ("static") or anew ("dynamic")."""

    family: str
    producer: str
    layouts: tuple[str, ...]
    group: tuple[int, ...] | None = None
    activations: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A quantised weight: logical `name` and `shape`, its family and form, its tensors by role, and what it takes in
    the files: `bytes` of all parts, `bits` a weight."""

    name: str
    family: str
    form: Form
    parts: dict[str, str]
    bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.form.shape

    @property
    def values(self) -> int:
        """Logical weights."""
        return prod(self.form.shape)

    @property
    def bits(self) -> float:
        """Stored bits a weight, scales included."""
        return 8 * self.bytes / max(self.values, 1)


def by_extent(form: Form, declared: Declared) -> Form | None:
    """The form with the declared group, if that group gives as many scales as there are; None if it does not."""
    if not declared.group or not form.group:
        return form
    group = declared.group[-len(form.group) :]
    for size, mine, said in zip(form.shape[-len(form.group) :], form.group, group, strict=True):
        if _scales(size, mine) != _scales(size, said):
            return None
    return replace(form, group=group)


def _scales(size: int, extent: int) -> int:
    return -(-size // extent) if extent else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family. `match(parts)` is the form of a weight by dtypes and shapes alone, or None; `declared(quant, owner)`
    reads a `quantization_config` and the configuration that holds it; `settle(form, declared)` is the form with what
    only the configuration tells, None where its group contradicts the scales; `bits` are nominal bits a weight with
    scales; `loads` is empty when dz loads it today, else why not; `how` says in words how it is recognised."""

    name: str
    how: str
    bits: Callable[[Mapping[str, Any]], float]
    match: Callable[[Parts], Form | None]
    declared: Callable[[Mapping[str, Any], Mapping[str, Any]], Declared | None]
    settle: Callable[[Form, Declared], Form | None] = by_extent
    loads: str = ""


def conflict(what: str, why: str) -> Refused:
    """The refusal of headers and configuration that disagree."""
    return Refused(
        what, why, "check quantization_config against the files: `dz fetch MODEL --verify`", code="format_conflict"
    )


def groups_of(quant: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The weight descriptions of a compressed-tensors configuration."""
    groups = quant.get("config_groups")
    rows = groups.values() if isinstance(groups, Mapping) else groups if isinstance(groups, list) else ()
    found = [g.get("weights") for g in rows if isinstance(g, Mapping)]
    return [w for w in found if isinstance(w, Mapping)]


def formats_of(quant: Mapping[str, Any]) -> set[str]:
    """The format names of a compressed-tensors configuration."""
    groups = quant.get("config_groups")
    rows = groups.values() if isinstance(groups, Mapping) else ()
    names = [quant.get("format"), *(g.get("format") for g in rows if isinstance(g, Mapping))]
    return {n for n in names if isinstance(n, str)}
