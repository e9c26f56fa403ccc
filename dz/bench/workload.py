"""What a bench needs to know of an op: how to make arguments of a real shape, what they cost, how to check a part."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dz.core.op import Tolerance
from dz.errors import UsageError


@dataclass(frozen=True, slots=True)
class Cost:
    """The least that must happen: bytes through device memory (each input read once, each output written once) and
    floating-point operations by the dtype of the unit that does them."""

    bytes: float
    flops: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A result against fp32 truth: relative Frobenius error, largest absolute error, whether it is within the op's
    tolerance, and what was compared."""

    rel: float
    max_abs: float
    ok: bool
    what: str


Shape = Mapping[str, Any]
Build = Callable[[Shape, torch.device, torch.Generator], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`build(shape, device, generator)` gives the op's arguments; `cost(shape)` the least it takes; `part(args,
    result)` arguments and result of a part small enough for the reference; `tiny` is a shape for any machine; `check`
    replaces the comparison where equality of numbers is not the question."""

    op: str
    build: Build
    cost: Callable[[Shape], Cost]
    tiny: Shape
    part: Callable[[dict[str, Any], Any], tuple[dict[str, Any], Any]] = lambda args, result: (args, result)
    check: Callable[[Any, Any], Checked] | None = None


def workloads() -> dict[str, Workload]:
    """Every WORKLOAD in dz/bench/workloads, by op."""
    package = importlib.import_module("dz.bench.workloads")
    names = [m.name for m in pkgutil.iter_modules(package.__path__)]
    found = [importlib.import_module(f"{package.__name__}.{name}").WORKLOAD for name in names]
    return {w.op: w for w in found}


def dimension(shape: Shape, name: str) -> int:
    """A whole number of a shape. Raises UsageError when the recipe does not give it."""
    value = shape.get(name)
    if not isinstance(value, int):
        what = f"a bench shape without a whole number '{name}'"
        raise UsageError(what, f"it says {dict(shape)}", "mend the recipe's bench section", code="bad_recipe")
    return value


def normal(generator: torch.Generator, *size: int, dtype: str = "float32", scale: float = 1.0) -> Tensor:
    """Normal values on the generator's device, made in pieces so that no fp32 copy of the whole is needed."""
    out = torch.empty(size, dtype=getattr(torch, dtype), device=generator.device)
    flat = out.view(-1)
    step = 1 << 28
    for i in range(0, flat.numel(), step):
        piece = flat[i : i + step]
        piece.copy_(torch.randn(piece.numel(), generator=generator, device=generator.device) * scale)
    return out


def against(got: Any, want: Any, tol: Tolerance, what: str) -> Checked:
    """`got` against `want` (tensors or tuples of them), bit by bit for a tolerance of (0, 0)."""
    pairs = list(zip(got, want, strict=True)) if isinstance(want, tuple | list) else [(got, want)]
    error = size = worst = 0.0
    ok = True
    for g, w in pairs:
        same = g.shape == w.shape and torch.equal(_bytes(g), _bytes(w.to(g.dtype)))
        g, w = g.double(), w.double()
        diff = torch.where(g == w, 0.0, (g - w).abs())
        exact = tol.atol == 0 and tol.rtol == 0
        ok &= same if exact else bool((diff <= tol.atol + tol.rtol * w.abs()).all())
        error += float(diff.square().sum())
        size += float(w.square().sum())
        worst = max(worst, float(diff.max()) if diff.numel() else 0.0)
    return Checked(rel=(error / size) ** 0.5 if size else error**0.5, max_abs=worst, ok=ok, what=what)


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)
