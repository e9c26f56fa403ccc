"""Where something can be put in: a module's forward, or a function in the globals of a modelling file."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from dz.errors import Refused

_ABSENT = object()


class Place:
    """One replaceable name. `original` is what a call reaches now; `put` replaces it, `undo` puts back what was there
    and raises RuntimeError when something else had been put over it."""

    def __init__(self, owner: nn.Module | types.ModuleType, name: str) -> None:
        self.owner, self.name = owner, name
        self.original: Callable[..., Any] = getattr(owner, name)
        self._before = vars(owner).get(name, _ABSENT)
        self._new: Any = _ABSENT

    @property
    def target(self) -> Any:
        """What the op's binding refers to: the module, or the function."""
        return self.owner if isinstance(self.owner, nn.Module) else self.original

    def put(self, new: Callable[..., Any]) -> None:
        """Replace it."""
        self._new = new
        setattr(self.owner, self.name, new)

    def undo(self) -> None:
        """Put back what was there."""
        if self._new is _ABSENT:
            return
        if vars(self.owner).get(self.name, _ABSENT) is not self._new:
            raise RuntimeError(f"{self} was replaced by something else while it was bound")
        if self._before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._before)
        self._new = _ABSENT

    def is_original(self) -> bool:
        """Whether the place holds what it held when it was found."""
        return vars(self.owner).get(self.name, _ABSENT) is self._before

    def __str__(self) -> str:
        kind = type(self.owner).__name__ if isinstance(self.owner, nn.Module) else self.owner.__name__
        return f"{kind}.{self.name}"


def places(model: nn.Module, site: str, kind: str, members: tuple[str, ...]) -> list[Place]:
    """The places of a site in a live model. Raises Refused when the model has no such module or function."""
    if kind == "function":
        home, _, name = site.partition(":")
        module = _home(model, home)
        if module is None or not isinstance(vars(module).get(name), types.FunctionType):
            raise _gone(site, f"the loaded code has no function {name} in {home}")
        return [Place(module, name)]
    try:
        return [Place(model.get_submodule(m), "forward") for m in members]
    except AttributeError as e:
        raise _gone(site, str(e)) from e


def _home(model: nn.Module, name: str) -> types.ModuleType | None:
    """The modelling module of this name; a repository's code may be loaded under another package."""
    if name in sys.modules:
        return sys.modules[name]
    leaf = name.rpartition(".")[2]
    homes = {type(m).__module__ for m in model.modules()}
    return next((sys.modules[h] for h in sorted(homes) if h.rpartition(".")[2] == leaf and h in sys.modules), None)


def _gone(site: str, why: str) -> Refused:
    return Refused(f"the plan names {site}, the model has no such place", why, "dz adapt MODEL", code="drift")
