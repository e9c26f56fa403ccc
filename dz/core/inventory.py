"""What is in a model: sites, their bindings, and every tensor accounted for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """Where one op argument comes from: a parameter or attribute of the module (dotted `path`), an argument of its
    forward (`path` is its name), a constant `value`, or the result of the child module at `path` applied to the forward
    argument that `value` names."""

    name: str
    source: Literal["parameter", "attribute", "forward", "constant", "child"]
    path: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How a site supplies an op's arguments, and how the op's result becomes forward's: `then` is the child module that
    is applied to it, `returns` says whether it is the result or the first of a pair with None. Forward arguments that
    are not bound must keep their default: a call that gives another value goes to upstream's code."""

    args: tuple[Arg, ...] = ()
    returns: Literal["value", "tuple_first"] = "value"
    then: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An op's answer about a site: known with a binding, or a variant with what precisely differs. A known site without
    binding is understood and counted, but no kernel can be bound to it."""

    op: str
    status: Literal["known", "variant"]
    reason: str
    binding: Binding | None = None
    differs: tuple[str, ...] = ()
    traits: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """What `recognise` may look at: the live module on meta (or the function), and the source of its forward."""

    kind: Literal["module", "function", "interface"]
    fqn: str
    target: Any
    source: str
    config: Any
    parent: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """A token mixer: what state it keeps in which form, and the engine tiers that can hold it."""

    kind: str
    layers: tuple[int, ...]
    state: Literal["kv", "recurrent", "kv+recurrent", "other"]
    tiers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in the model that an op can take. `id` is an FQN glob with `*` for layer and expert numbers; `members`
    are the concrete names. `parameters` counts elements and `bytes` checkpoint bytes of all members, their own only."""

    id: str
    kind: Literal["module", "function", "interface"]
    cls: str
    where: str
    members: tuple[str, ...]
    status: Literal["known", "variant", "unknown"]
    op: str | None = None
    reason: str = ""
    differs: tuple[str, ...] = ()
    binding: Binding | None = None
    traits: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: int = 0
    bytes: int = 0
    mixer: Mixer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A weight file: tensors counted from its header."""

    path: str
    size: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Both directions of headers against parameters. `ignored` are unexpected tensors that the class itself or the
    recipe names, with their bytes; `narrowed` are vectors stored longer than the model takes, with how many of
    their values count (the others must be zero); everything in `missing`, `unexpected` and `shape_changed` refuses a
    load."""

    matched: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shape_changed: tuple[str, ...] = ()
    ignored: dict[str, int] = field(default_factory=dict)
    ignored_by: dict[str, str] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    narrowed: dict[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True when every parameter has its tensor and every tensor its parameter."""
        return not (self.missing or self.unexpected or self.shape_changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A repository, read without loading a weight. `runs` says whose code: "transformers" or "repository"; `quantised`
    says by glob over module names whether the files keep them quantised, and which pattern leaves them as they are."""

    model: str
    rev8: str
    cls: str
    runs: Literal["transformers", "repository"]
    code_hash: str
    model_type: str
    dtype: str
    config: dict[str, Any]
    layers: int
    modalities: tuple[str, ...]
    max_positions: int
    sites: tuple[Site, ...]
    files: tuple[WeightFile, ...]
    coverage: Coverage
    parameters: int
    bytes: int
    formats: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quantised: dict[str, str] = field(default_factory=dict)

    def count(self, status: str) -> int:
        """How many sites have this status."""
        return sum(s.status == status for s in self.sites)
