"""A plan: the decision for one model on one device. JSON, hashed over all its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dz.core.inventory import Binding

PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Proof of a choice: `max_err` is the largest error over `cases` cases, in units of the case's largest value where
    that is above 1; each case held the tolerance `tol`. `level` is op, layer or model; `data` says on what: "real
    weights", "random weights" or "no weights"."""

    level: str
    max_err: float
    tol: str
    cases: int
    data: str = "real weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A candidate that was not taken, and why."""

    impl: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What runs at a site in one phase: `impl` is "upstream", "reference" or "<op>/<technique>". `tier` is set for
    token mixers: isolate, gather or paged."""

    impl: str
    reason: str
    tier: str | None = None
    rejected: tuple[Rejected, ...] = ()
    verified: Verified | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlan:
    """The choices for a site, by phase. `members` and `binding` are there where something other than upstream's code
    may run: what a swap needs."""

    site: str
    op: str | None
    status: Literal["known", "variant", "unknown"]
    count: int
    phases: dict[str, Choice]
    kind: Literal["module", "function", "interface"] = "module"
    members: tuple[str, ...] = ()
    binding: Binding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One line of the memory plan: `bytes` on each device, and how it was worked out."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`hash` covers every input (`inputs`: inventory, recipe, device, settings, versions, kernel sources by digest).
    `ignore_unexpected` are globs of tensors that a recipe lets stay unloaded."""

    model: str
    rev8: str
    device: str
    dtype: str
    sites: tuple[SitePlan, ...]
    memory: tuple[MemoryRow, ...] = ()
    recipe: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    hash: str = ""
    broken_requirements: tuple[str, ...] = ()
    ignore_unexpected: tuple[str, ...] = ()

    def swaps(self) -> tuple[SitePlan, ...]:
        """The sites where a phase runs something other than upstream's code."""
        return tuple(s for s in self.sites if any(c.impl != "upstream" for c in s.phases.values()))
