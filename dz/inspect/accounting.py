"""Every parameter and every checkpoint byte belongs to exactly one module: the one that holds it directly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from dz.core.headers import TensorInfo
from dz.upstream.build import Built
from dz.upstream.targets import targets


@dataclass(slots=True)
class Share:
    """What one module holds itself: shapes by name, elements counted once, and the checkpoint bytes that fill them.
    `tied` are names whose tensor another module holds."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: int = 0
    bytes: int = 0
    tied: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Books:
    """`shares` by module name; `placed` maps each checkpoint tensor to its parameter; `loose` are tensors that fill
    nothing, with their bytes."""

    shares: dict[str, Share]
    placed: dict[str, str]
    loose: dict[str, int]

    @property
    def parameters(self) -> int:
        """Elements of all parameters and stored buffers, tied ones once."""
        return sum(s.parameters for s in self.shares.values())

    @property
    def bytes(self) -> int:
        """Checkpoint bytes that fill a parameter."""
        return sum(s.bytes for s in self.shares.values())


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and the stored buffers that a module holds itself."""
    out: dict[str, torch.Tensor] = {n: p for n, p in module._parameters.items() if p is not None}
    hidden = module._non_persistent_buffers_set
    return out | {n: b for n, b in module._buffers.items() if b is not None and n not in hidden}


def books(built: Built, headers: Mapping[str, TensorInfo]) -> Books:
    """Hand every parameter and every tensor to the module that holds it."""
    placed = targets(built, headers)
    bytes_of: dict[str, int] = {}
    for tensor, name in placed.items():
        bytes_of[name] = bytes_of.get(name, 0) + headers[tensor].bytes
    shares: dict[str, Share] = {}
    seen: set[int] = set()
    for prefix, module in built.model.named_modules():
        share = Share()
        for name, tensor in own_tensors(module).items():
            full = f"{prefix}.{name}" if prefix else name
            share.shapes[name] = tuple(tensor.shape)
            share.bytes += bytes_of.pop(full, 0)
            if id(tensor) in seen:
                share.tied.append(name)
            else:
                seen.add(id(tensor))
                share.parameters += tensor.numel()
        if share.shapes:
            shares[prefix] = share
    loose = {t: headers[t].bytes for t in headers if t not in placed}
    return Books(shares, placed, loose)
