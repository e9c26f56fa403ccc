"""Inventory + recipe + device -> plan. Importing the package imports no torch, asking for a name does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dz.adapt.current import Drift, current_plan, drift, write
    from dz.adapt.diff import make_difference
    from dz.adapt.fit import make_fit
    from dz.adapt.make import make_plan

__all__ = ["Drift", "current_plan", "drift", "make_difference", "make_fit", "make_plan", "write"]
_HOME = {"make_plan": "make", "make_difference": "diff", "make_fit": "fit"}  # the others are in `current`


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"dz.adapt.{_HOME.get(name, 'current')}")
        return getattr(module, name)
    raise AttributeError(f"module 'dz.adapt' has no attribute {name!r}")
