"""Calls of a site to verify it with: real widths, ragged rows, both phases, strided and extreme values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dz.core.inventory import Site
from dz.ops.cases import Maker

ROWS = (1, 2, 7, 33)


@dataclass(frozen=True, slots=True)
class Example:
    """One call of a site: positional arguments of its forward, in the order of its signature."""

    id: str
    args: tuple[Any, ...]


def examples(site: Site, target: Any, *, dtype: str, device: str, phase: str, seed: int = 0) -> list[Example] | None:
    """The calls for a site's op; None for an op that has no examples, whose sites then cannot be verified here."""
    make = _MAKERS.get(str(site.op))
    return None if make is None else list(make(site, target, Maker(dtype, device, seed), phase))


def _lead(rows: int, phase: str) -> tuple[int, int]:
    """Leading axes: packed [1, T] in prefill, one token a sequence [B, 1] in decode."""
    return (1, rows) if phase == "prefill" else (rows, 1)


def _hidden(width: int, m: Maker, phase: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Hidden states [B, T, width]: ragged counts, then values that bring out eps, overflow and strides."""
    for rows in ROWS:
        yield f"rows{rows}", m.normal(*_lead(rows, phase), width)
    yield "small_values", m.normal(*_lead(5, phase), width, scale=1e-3)
    x = m.normal(*_lead(3, phase), width)
    x[..., width // 2] *= 200.0
    yield "one_large_channel", x
    x = m.normal(*_lead(4, phase), width, shift=2.0)
    x[(0, 0) if phase == "prefill" else (slice(0, 1), 0)] = 0.0
    yield "a_zero_row", x
    yield "strided", m.normal(*_lead(7, phase), 2 * width)[..., ::2]
    yield "transposed", m.normal(7, 3, width).transpose(0, 1)


def _norm(site: Site, target: Any, m: Maker, phase: str) -> Iterator[Example]:
    width = site.traits.get("width") or _last(target.weight) if getattr(target, "weight", None) is not None else 64
    for name, x in _hidden(int(width), m, phase):
        yield Example(name, (x,))


def _last(weight: torch.Tensor) -> int:
    return weight.shape[-1]


def _gated(site: Site, target: Any, m: Maker, phase: str) -> Iterator[Example]:
    if not isinstance(target, nn.Module):
        for rows, width in ((1, 33), (2, 64), (7, 130), (33, 17)):
            shape = (*_lead(rows, phase), width)
            yield Example(f"rows{rows}_i{width}", (m.normal(*shape, scale=3.0), m.normal(*shape, scale=3.0)))
        return
    child = next(a.path for a in (site.binding.args if site.binding else ()) if a.source == "child")
    weight = target.get_submodule(child).weight
    for name, x in _hidden(_last(weight), m, phase):  # type: ignore[arg-type]
        yield Example(name, (x,))


def _unpack(site: Site, target: Any, m: Maker, phase: str) -> Iterator[Example]:
    flat = site.traits.get("layout") == "flat"
    first = site.binding.args[0].path if site.binding else ""
    names = list(site.traits.get("arguments", ()))
    for rows, blocks in ((1, 1), (2, 3), (7, 5), (33, 2)):
        packed = m.ints(0, 256, 2, rows, blocks, 16, dtype="uint8")
        scales = m.ints(90, 160, 2, rows, blocks, dtype="uint8")
        pair = (packed.flatten(-2) if flat else packed, scales)
        rest = tuple(getattr(torch, str(site.traits["output"])) for n in names[2:3] if "dtype" in n)
        yield Example(f"rows{rows}_blocks{blocks}", (*(pair if names[:1] == [first] else pair[::-1]), *rest))


_MAKERS: dict[str, Callable[[Site, Any, Maker, str], Iterator[Example]]] = {
    "rms_norm": _norm,
    "layer_norm": _norm,
    "gated_activation": _gated,
    "mxfp4_unpack": _unpack,
}
