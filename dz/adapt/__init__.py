"""Inventory + recipe + device -> plan. Importing the package imports no torch, asking for a name does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dz.adapt.current import Drift, current_plan, drift, write
    from dz.adapt.make import make_plan

__all__ = ["Drift", "current_plan", "drift", "make_plan", "write"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module("dz.adapt.make" if name == "make_plan" else "dz.adapt.current")
        return getattr(module, name)
    raise AttributeError(f"module 'dz.adapt' has no attribute {name!r}")
