"""Record what goes into and comes out of a site while upstream runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dz.core.inventory import Site
from dz.swap.places import places


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a site: its arguments and its result, tensors copied."""

    member: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@contextmanager
def capture(model: nn.Module, site: Site, *, most: int = 16) -> Iterator[list[Call]]:
    """Yields a list that fills with the first `most` calls of the site; everything is put back at the end."""
    seen: list[Call] = []
    found = places(model, site.id, site.kind, site.members)
    names = site.members if site.kind != "function" else (site.id,)
    try:
        for place, name in zip(found, names, strict=True):
            place.put(_recorder(place.original, name, seen, most))
        yield seen
    finally:
        for place in reversed(found):
            place.undo()


def _recorder(original: Callable[..., Any], name: str, seen: list[Call], most: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        keep = len(seen) < most
        given = (_copy(args), _copy(kwargs)) if keep else None
        result = original(*args, **kwargs)
        if given is not None:
            seen.append(Call(name, given[0], given[1], _copy(result)))
        return result

    return forward


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return tuple(_copy(v) for v in value)
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return value
