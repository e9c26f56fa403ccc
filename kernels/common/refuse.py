"""Words of refusal that the kernels' `supports` share: each returns the reason, or "" if there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from dz.core.kernel import YES, Support

FLOATS = ("float32", "float16", "bfloat16")


def support(*reasons: str) -> Support:
    """Yes, or the first reason that is not empty."""
    reason = next((r for r in reasons if r), "")
    return Support(False, reason) if reason else YES


def unknown(args: Mapping[str, Any], known: Iterable[str]) -> str:
    """Arguments that the kernel has never heard of: an op that grows an argument must not lose it silently."""
    extra = sorted(set(args) - set(known))
    return f"does not take {', '.join(extra)}" if extra else ""


def name_of(t: Tensor) -> str:
    """A tensor's dtype as ops and plans name it."""
    return str(t.dtype).removeprefix("torch.")


def dtypes(args: Mapping[str, Any], names: Iterable[str], allowed: Iterable[str]) -> str:
    """The first of the named tensors whose dtype is not among `allowed`."""
    allowed = tuple(allowed)
    for name in names:
        t = args.get(name)
        if isinstance(t, Tensor) and name_of(t) not in allowed:
            return f"{name} is {name_of(t)}; takes {', '.join(allowed)}"
    return ""


def same_dtype(args: Mapping[str, Any], names: Iterable[str]) -> str:
    """Tensors of different dtypes among the named ones."""
    found = {name: name_of(t) for name in names if isinstance(t := args.get(name), Tensor)}
    return f"mixed dtypes: {', '.join(f'{k} {v}' for k, v in found.items())}" if len(set(found.values())) > 1 else ""


def one_device(args: Mapping[str, Any]) -> str:
    """Tensors on different devices."""
    devices = {str(t.device) for t in args.values() if isinstance(t, Tensor)}
    return f"tensors on {' and '.join(sorted(devices))}" if len(devices) > 1 else ""


def off_grid(args: Mapping[str, Any], names: Iterable[str], grid: int = 16) -> str:
    """Tensors among the named ones whose rows are not contiguous or do not begin at multiples of `grid` bytes."""
    loose = []
    for name in names:
        t: Tensor = args[name]
        steps = [s * t.element_size() for s in t.stride()[:-1]]
        if t.stride(-1) != 1 or any(s % grid for s in steps) or t.data_ptr() % grid:
            loose.append(name)
    return f"{' and '.join(loose)} off the {grid}-byte grid" if loose else ""
