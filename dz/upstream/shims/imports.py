"""Import statements of one repository's code, answered with stand-ins where the installed packages lack the name.

`builtins.__import__` knows the module that imports, so everybody else's imports go their way untouched, and nothing is
put into `sys.modules`: that a package is not installed stays true for all who ask."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from dz.upstream.shims.scoped import asked_by
from dz.upstream.shims.shim import Symbol, load

Import = Callable[..., Any]


class StandIn(ModuleType):
    """A module in the place of another: the names that it was given, and for the rest what is really there."""

    def __init__(self, name: str, real: ModuleType | None) -> None:
        super().__init__(name)
        self.__dict__["_real"] = real
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = self.__dict__["_real"]
        if real is None:
            raise AttributeError(f"the stand-in for {self.__name__!r} has no {name!r}")
        return getattr(real, name)


class Hook:
    """What the modules of each package `owner` get for which symbols."""

    def __init__(self) -> None:
        self._given: dict[str, dict[str, dict[str, Any]]] = {}
        self._before: Import | None = None

    def give(self, owner: str, symbols: Iterable[Symbol]) -> None:
        """Let modules of `owner` import these."""
        table = self._given.setdefault(owner, {})
        for s in symbols:
            table.setdefault(s.module, {})[s.name] = load(s.make)(_real(s.module, s.name))
        if self._before is None:
            self._before = builtins.__import__
            builtins.__import__ = self._import

    def take_back(self, owner: str) -> None:
        """End it for `owner`; without any owner Python's own import is back."""
        self._given.pop(owner, None)
        if not self._given and self._before is not None:
            builtins.__import__ = self._before
            self._before = None

    def packages(self) -> set[str]:
        """The top-level packages that have stand-ins."""
        return {m.partition(".")[0] for table in self._given.values() for m in table}

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        real = self._before or builtins.__import__
        who = str((globals or {}).get("__name__", ""))
        table = next((t for owner, t in self._given.items() if asked_by(who, {owner})), None)
        if table is not None and not level:
            if fromlist and name in table and not {*fromlist}.isdisjoint({*table[name], "*"}):
                if _module(name) is not None:  # names that are submodules become so by being imported
                    real(name, globals, locals, tuple(f for f in fromlist if f not in table[name]), level)
                return _stand_in(name, table)
            if fromlist and any(f"{name}.{f}" in table and _module(f"{name}.{f}") is None for f in fromlist):
                return _stand_in(name, table)
            if not fromlist and _covers(name, table) and _module(name) is None:
                return _stand_in(name.partition(".")[0], table)
        return real(name, globals, locals, fromlist, level)


HOOK = Hook()


def _covers(name: str, table: Mapping[str, Any]) -> bool:
    return any(m == name or m.startswith(name + ".") for m in table)


def _stand_in(name: str, table: Mapping[str, Mapping[str, Any]]) -> StandIn:
    """The stand-in for a module, with those for its submodules below it."""
    out = StandIn(name, _module(name))
    out.__dict__.update(table.get(name, {}))
    for below in {m[len(name) + 1 :].partition(".")[0] for m in table if m.startswith(name + ".")}:
        out.__dict__[below] = _stand_in(f"{name}.{below}", table)
    return out


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _real(module: str, name: str) -> Any:
    return getattr(_module(module), name, None)
