"""Names on upstream's classes that the code of one repository sees and nobody else does.

Who asks is told from the calling frame: the name of its module. So upstream's own code, and that of another repository
in the same process, meets the classes as they are, and `hasattr` there answers as before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dz.upstream.shims.shim import Attribute, load

_ABSENT = object()
_LOOKUPS = ("__getattribute__", "__getattr__")  # of classes that have their own


class Scoped:
    """A class attribute with one value for some modules and the installed one for all others. `owners` are the packages
    whose modules see `made`."""

    def __init__(self, name: str, kind: str, made: Callable[..., Any], real: Any) -> None:
        self.name, self.kind, self.made, self.real = name, kind, made, real
        self.owners: set[str] = set()

    def __get__(self, held: Any, cls: type | None = None) -> Any:
        if asked_by(_caller(), self.owners):
            if self.kind == "property":
                return self.made(held)
            return self.made.__get__(cls if self.kind == "class method" else held)
        if self.real is _ABSENT:
            raise AttributeError(f"{getattr(cls, '__name__', cls)!r} object has no attribute {self.name!r}")
        get = getattr(type(self.real), "__get__", None)
        return self.real if get is None else get(self.real, held, cls)


class ScopedData(Scoped):
    """As `Scoped`, for a name that upstream's property sets too: writing goes to upstream's own."""

    def __set__(self, held: Any, value: Any) -> None:
        self.real.__set__(held, value)


def _caller() -> str:
    """The module of the code that asks: the nearest frame outside this file that is no attribute look-up itself."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _LOOKUPS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def asked_by(module: str, owners: set[str]) -> bool:
    """Whether a module lies in one of the packages."""
    return any(module == o or module.startswith(o + ".") for o in owners)


def special(name: str, made: Callable[..., Any], owners: set[str]) -> Callable[..., Any]:
    """A method with a special name: Python looks these up on the class, so the function itself asks who calls."""

    def method(held: Any, key: Any) -> Any:
        if not asked_by(_caller(), owners):
            raise TypeError(f"{type(held).__name__!r} object is not subscriptable")
        return made(held, key)

    method.__name__ = name
    vars(method)["owners"] = owners
    return method


def put(cls: type, attribute: Attribute, owner: str) -> Callable[[], None]:
    """Let modules of the package `owner` see the attribute; returns what takes it back."""
    there = cls.__dict__.get(attribute.name, _ABSENT)
    owners = getattr(there, "owners", None) if callable(there) else None
    if isinstance(there, Scoped):
        owners = there.owners
    if owners is not None:
        owners.add(owner)
        return lambda: owners.discard(owner)
    made = load(attribute.make)
    if attribute.name.startswith("__"):
        setattr(cls, attribute.name, special(attribute.name, made, {owner}))
        return lambda: delattr(cls, attribute.name)
    kind = ScopedData if attribute.writable else Scoped
    new = kind(attribute.name, attribute.kind, made, _inherited(cls, attribute.name) if there is _ABSENT else there)
    new.owners.add(owner)
    setattr(cls, attribute.name, new)
    return (lambda: delattr(cls, attribute.name)) if there is _ABSENT else lambda: setattr(cls, attribute.name, there)


def _inherited(cls: type, name: str) -> Any:
    return next((c.__dict__[name] for c in cls.__mro__[1:] if name in c.__dict__), _ABSENT)
