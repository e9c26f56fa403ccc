"""An op: the torch reference is its meaning; kernels are measured against it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dz.core.inventory import Match, SiteView


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted error of a kernel against fp32 truth: |x - ref| <= atol + rtol * |ref|. (0, 0) is bit-exact."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments for an op's reference. `id` is readable ("rows7_d33_offset"); `args` maps parameter names."""

    id: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """`reference(**args)` is the contract. `inputs(dtype, device, seed)` yields Cases for the contract test (ragged,
    empty, one, long, non-contiguous). `tolerance` is by dtype name. `recognise(site)` says whether a place in a model
    is this op: a Match (known, with its binding, or a variant, with what differs), or None."""

    name: str
    summary: str
    reference: Callable[..., Any]
    tolerance: Mapping[str, Tolerance]
    inputs: Callable[[str, str, int], Iterator[Case]] | None = None
    recognise: Callable[[SiteView], Match | None] | None = None
    kind: Literal["module", "function", "interface"] = "module"
    source: str = ""
    phases: tuple[str, ...] = field(default=("prefill", "decode"))

    @property
    def signature(self) -> inspect.Signature:
        """The signature every kernel of this op shares."""
        return inspect.signature(self.reference)
