"""One site's module with real weights, alone: what a kernel is compared with, without loading the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dz.core.inventory import Site
from dz.core.plan import Verified
from dz.verify.bound import Bound

Read = Callable[[str, tuple[int, ...]], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Subject:
    """A site's target, ready to be called. `data` is "real weights", "random weights" or "no weights"."""

    site: Site
    target: Any
    data: str

    def wide(self) -> Any:
        """The target in float32: what the truth is taken from."""
        return copy.deepcopy(self.target).float() if isinstance(self.target, nn.Module) else self.target

    def bound(self) -> Bound:
        """The target with the site's binding."""
        if self.site.binding is None:
            raise ValueError(f"{self.site.id} has no binding")
        return Bound(self.target, self.site.binding)

    def proof(self, worst: float, tol: str, cases: int) -> Verified:
        """The record of a verification of this subject."""
        return Verified(level="op", max_err=worst, tol=tol, cases=cases, data=self.data)


def subject(site: Site, live: Any, read: Read, *, dtype: torch.dtype, device: str, seed: int = 0) -> Subject:
    """A copy of a live module (on meta) or the function itself. `read(name, shape)` gives the checkpoint's tensor for a
    parameter of that name below the first member, or None: then all of that parameter is random, and the subject says
    so. Computed buffers keep their values."""
    if not isinstance(live, nn.Module):
        return Subject(site, live, "no weights")
    target = _clone(live)
    generator, real, total = torch.Generator().manual_seed(seed), 0, 0
    for prefix, module in target.named_modules():
        tables: list[Any] = [module._parameters, module._buffers]
        for table in tables:
            for name, held in list(table.items()):
                if held is None or held.device.type != "meta":
                    continue
                full = f"{prefix}.{name}" if prefix else name
                value = read(full, tuple(held.shape))
                real, total = real + (value is not None), total + 1
                value = _random(site, held, generator) if value is None else value
                value = value.to(device=device, dtype=dtype if held.is_floating_point() else held.dtype, copy=True)
                table[name] = nn.Parameter(value, requires_grad=False) if table is module._parameters else value
    data = "no weights" if not total else "real weights" if real == total else "random weights"
    return Subject(site, target.to(device).eval(), data)


def _clone(live: nn.Module) -> nn.Module:
    """A copy whose modules are new and whose configuration and other plain attributes are shared."""
    memo: dict[int, Any] = {}
    for module in live.modules():
        config = vars(module).get("config")
        if config is not None:
            memo[id(config)] = config
    return copy.deepcopy(live, memo)


def _random(site: Site, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Weights of the size that trained ones have: about 1 / sqrt(inputs) for matrices, about 1 for a norm's scale."""
    n = torch.randn(tuple(like.shape), generator=generator)
    if like.dim() >= 2:
        return n * like.shape[-1] ** -0.5
    return 0.3 * n + (0.0 if site.traits.get("offset") else 1.0)


def reader(placed: Mapping[str, str], member: str, get: Callable[[str], torch.Tensor]) -> Read:
    """A `read` for `subject` from a checkpoint. `placed` maps tensors to parameters; only a parameter that exactly one
    tensor of its own shape fills is read, others are made by upstream's conversions and stay random here."""
    sources: dict[str, list[str]] = {}
    for tensor, parameter in placed.items():
        sources.setdefault(parameter, []).append(tensor)

    def read(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        found = sources.get(f"{member}.{name}" if member else name, [])
        if len(found) != 1:
            return None
        value = get(found[0])
        return value if tuple(value.shape) == shape and value.is_floating_point() else None

    return read
