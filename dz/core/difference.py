"""What separates a model from what dz knows: for each place the nearest known form and where it departs from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A statement of a source file: `file` as `package.module`, its first line, and its text in one line."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A module or function of the installed upstream: `name` is `package.module:Name`; `likeness` is 0 (nothing in
    common) to 1 (the same structure); `copies` counts the other places that have the same structure."""

    name: str
    line: int
    likeness: float
    copies: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """What a place takes and gives, in words: arguments with their shapes where a run on meta reached it, else as its
    source declares them."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    traced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDifference:
    """One site. For a variant: `form` is the nearest known form of its op, `differs` the op's own words, `added` the
    statements that the form has not and `absent` those that only the form has, `config` the keys (with values) that
    this class reads and the form's does not, `shapes` the tensors that the form has no place for. For an unknown site:
    `neighbours`, `io`, `shapes` (all its tensors), `state`, the file to write and the command that begins it."""

    site: str
    status: Literal["known", "variant", "unknown"]
    op: str | None
    cls: str
    where: str
    count: int
    parameters: int
    reason: str
    differs: tuple[str, ...] = ()
    form: Neighbour | None = None
    neighbours: tuple[Neighbour, ...] = ()
    added: tuple[Line, ...] = ()
    absent: tuple[Line, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    io: Tensors = Tensors()
    state: str = ""
    write: str = ""
    begin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All sites of a model. `unread` are keys of config.json that no code of the model reads; `index` says which
    upstream the neighbours come from."""

    model: str
    rev8: str
    cls: str
    runs: Literal["transformers", "repository"]
    parameters: int
    sites: tuple[SiteDifference, ...]
    unread: tuple[str, ...] = ()
    index: str = ""

    def of(self, status: str) -> tuple[SiteDifference, ...]:
        """The sites with this status."""
        return tuple(s for s in self.sites if s.status == status)

    @property
    def known_share(self) -> float:
        """The share of parameters that lie in known sites, 0 to 1."""
        known = sum(s.parameters for s in self.of("known"))
        return known / self.parameters if self.parameters else 1.0
