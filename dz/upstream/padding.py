"""Vectors that a checkpoint stores longer than the model takes, filled up with zeros: cut, and said so."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dz.core.headers import TensorInfo
from dz.errors import Refused


def longer(
    headers: Mapping[str, TensorInfo], placed: Mapping[str, str], held: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """Tensor name -> values that count, for each vector that is longer than its parameter. `placed` gives the parameter
    of a tensor, `held` the model's own. Matrices are never cut: a longer one is another shape."""
    out = {}
    for name, target in placed.items():
        stored, own = headers[name].shape, tuple(held[target].shape)
        if len(stored) == len(own) == 1 and stored[0] > own[0]:
            out[name] = own[0]
    return out


def cut(name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` values. Raises Refused unless all others are zero: then they mean something."""
    rest = tensor[count:]
    if not rest.is_meta and bool((rest != 0).any()):
        raise Refused(
            f"{name} holds {len(tensor)} values where the model takes {count}",
            f"{int((rest != 0).sum())} of the others are not zero, so they are no padding",
            "check that config.json belongs to these weights: `dz fetch MODEL --verify`",
            code="padding",
        )
    return tensor[:count]
