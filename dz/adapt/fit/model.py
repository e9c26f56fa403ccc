"""The document of a fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dz.core.device import Device
from dz.inspect.ledger import Row

Bound = Literal["model", "memory", "weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """How many sequences of `tokens` fit on all devices together."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRow:
    """One way to lay a model over the devices, in bytes on each: routed experts over all (`ep`), matrices over `tp`,
    `dp` groups of these beside each other. `left` is memory without weights, `room` what the cache may take: the share
    of the memory that dz may use, without weights, workspace and activations.

    `per_token` and `per_sequence` are what one device keeps of a sequence of its group. `longest` is the longest
    context of one sequence, `bound` says what limits it. `spread` is the same with the parts of the cache that no
    heads divide cut by context. `experts_fp8` are the experts held as FP8 instead, `whole_matrices` what is added if
    the routers stay whole."""

    name: str
    tp: int
    dp: int
    ep: int
    experts: int
    dense: int
    weights: int
    left: int
    workspace: int
    activations: int
    room: int
    fits: bool
    verdict: str
    per_token: float
    per_sequence: float
    longest: int
    bound: Bound
    spread: int
    contexts: tuple[Context, ...]
    experts_fp8: int
    whole_matrices: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePart:
    """A kind of cache: layers that keep it, the formula of one, bytes a token and bytes a sequence of all of them."""

    kind: str
    layers: int
    formula: str
    per_token: float
    per_sequence: float
    split: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of weights: what it takes, whether the device computes in it, whether dz loads it."""

    name: str
    tensors: int
    values: int
    bytes: int
    bits: float
    native: bool
    loads: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """An op: how often it is in the model, and in each phase "<op>/<technique>", "reference (slow, exact)" or "none,
    because ...". `rejected` are kernels that were turned down, with the reason."""

    op: str
    count: int
    prefill: str
    decode: str
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model on a device. `known_from` says what was read; `band` is the relative error that the estimated weights may
    have, 0 for headers. `rows` are the weights by op and format, `unaccounted` header bytes that no row holds."""

    model: str
    rev8: str
    device: Device
    known_from: Literal["headers", "headers and class", "configuration"]
    band: float
    band_reason: str
    layers: int
    parameters: int
    bytes: int
    unaccounted: int
    max_positions: int
    cache_dtype: str
    rows: tuple[Row, ...]
    formats: tuple[Format, ...]
    cache: tuple[CachePart, ...]
    per_token: float
    per_sequence: float
    splits: tuple[SplitRow, ...]
    ops: tuple[OpRow, ...]
    notes: tuple[str, ...] = ()
