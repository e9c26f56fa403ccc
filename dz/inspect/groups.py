"""Modules of one structure, grouped: one name with `*` for numbers, one class, the same shapes and plain attributes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dz.inspect.accounting import own_tensors

_INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "idx", "index", "training"})
_MOST = 8  # layer numbers named in a site's id


@dataclass(slots=True)
class Group:
    """`members` share glob, class, shapes and attributes; `sample` stands for all of them."""

    glob: str
    sample: nn.Module
    members: list[str] = field(default_factory=list)


def glob_of(fqn: str) -> str:
    """A name with `*` for each whole number in it."""
    return ".".join("*" if p.isdigit() else p for p in fqn.split("."))


def group(modules: Iterable[tuple[str, nn.Module]]) -> list[Group]:
    """Groups in the order of their first members."""
    found: dict[Any, Group] = {}
    for fqn, module in modules:
        key = (glob_of(fqn), type(module), _shapes(module), _plain(module), _inside(module))
        found.setdefault(key, Group(key[0], module)).members.append(fqn)
    return list(found.values())


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((n, tuple(t.shape), str(t.dtype)) for n, t in own_tensors(module).items())


def _plain(module: nn.Module) -> tuple[Any, ...]:
    """Attributes that may steer a forward; numbers that only say which layer this is are left out."""
    kinds = (bool, int, float, str, type(None))
    items = ((k, v) for k, v in vars(module).items() if isinstance(v, kinds) and k not in _INDEX_NAMES)
    return tuple(sorted((k, repr(v)) for k, v in items if not k.startswith("_") or k in ("_apply_gate",)))


def _inside(module: nn.Module) -> tuple[Any, ...]:
    """What kind of children there are: two layers of one class may hold different ones."""
    return tuple((n, type(c).__qualname__, _shapes(c)) for n, c in module.named_children() if not n.isdigit())


def ids(globs: list[str], members: list[list[str]]) -> list[str]:
    """One unique id each: the glob, or where several share it, the glob with their layer numbers in braces."""
    out = []
    for glob, own in zip(globs, members, strict=True):
        if globs.count(glob) == 1:
            out.append(glob)
            continue
        numbers = list(dict.fromkeys(m.group() for n in own if (m := re.search(r"(?<=\.)\d+(?=\.|$)", n))))
        shown = numbers if len(numbers) <= _MOST else [*numbers[: _MOST - 2], "...", numbers[-1]]
        out.append(glob.replace("*", "{" + ",".join(shown) + "}", 1) if shown else glob)
    return [f"{i}#{out[:k].count(i) + 1}" if out.count(i) > 1 else i for k, i in enumerate(out)]
