"""The activations that gated and plain feed-forward ops share, by their published names."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
import torch.nn.functional as F

from dz.errors import UsageError


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of this name on tensors in working precision. Raises UsageError for a name that is not known."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    near = difflib.get_close_matches(name, ACTIVATIONS, 1)
    why = f"did you mean '{near[0]}'?" if near else f"the known ones are {', '.join(ACTIVATIONS)}"
    raise UsageError(f"no activation is called '{name}'", why, "dz ops ls", code="unknown_activation")
