"""What a shim is, and where a repository needs it. Nothing here imports torch: the list is read by the audit too."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

_HOME = "dz.upstream.shims."


def load(spec: str) -> Any:
    """The object that `module:name` means, the module being one beside this."""
    module, _, name = spec.partition(":")
    return getattr(import_module(_HOME + module), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """`from module import name` in the repository's code gives what `make` makes of the installed object (None where
    there is none). Without `changed` it is needed when the installed module lacks the name; `changed` is a string or
    argument whose presence in the installed definition says that it is still the old one. `mentions` are strings or
    keywords of which the code must use one; a file that defines the function `unless` is of today."""

    module: str
    name: str
    make: str
    changed: str = ""
    mentions: tuple[str, ...] = ()
    unless: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """`name` on objects of the installed class `cls` (module:class), as the repository's code alone sees it. `kind`
    says how it is reached. With `always` the installed class has the name too, with another meaning."""

    cls: str
    name: str
    make: str
    kind: Literal["method", "property", "class method"] = "method"
    always: bool = False
    writable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """A change of the repository's own classes after they are imported, or of its configuration: `make` returns
    whether it changed anything. `sees` names the function in `needs` that finds, by reading, what needs it."""

    make: str
    sees: str
    on: Literal["class", "configuration"] = "class"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shim:
    """One declared shim: `stands_for` what is gone, `releases` that had it, `safe` why the stand-in gives the same."""

    name: str
    stands_for: str
    releases: str
    safe: str
    symbols: tuple[Symbol, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    mends: tuple[Mend, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A shim that a repository needs, and the places (file:line: symbol) that need it."""

    shim: Shim
    places: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        """The need as plain JSON values."""
        s = self.shim
        return {
            "name": s.name,
            "stands_for": s.stands_for,
            "releases": s.releases,
            "safe": s.safe,
            "places": list(self.places),
        }
