"""Module-global functions of modelling files that a model's forwards reach: rope, convolutions, recurrences."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dz.ops._live import Unreadable, source


@dataclass(slots=True)
class Reached:
    """A function, the modelling module in whose globals it is found, and the model's modules that reach it."""

    home: types.ModuleType
    name: str
    function: types.FunctionType
    members: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """`package.module:function`."""
        return f"{self.home.__name__}:{self.name}"


def reached(model: nn.Module) -> list[Reached]:
    """The functions that forwards of a model's modules name, directly or through methods and other such functions.
    Functions of torch and of Python are not followed."""
    found: dict[tuple[str, str], Reached] = {}
    by_class: dict[type, list[tuple[types.ModuleType, str, types.FunctionType]]] = {}
    for fqn, module in model.named_modules():
        cls = type(module)
        if cls not in by_class:
            by_class[cls] = _of_class(cls)
        for home, name, function in by_class[cls]:
            site = found.setdefault((home.__name__, name), Reached(home, name, function))
            site.members.append(fqn)
    return [found[k] for k in sorted(found)]


def names_in(function: Any) -> set[str]:
    """The global names that a function's source mentions; empty when its source is not there."""
    try:
        body = source(inspect.unwrap(function))
    except (Unreadable, AttributeError):
        return set()
    return {n.id for n in ast.walk(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _of_class(cls: type) -> list[tuple[types.ModuleType, str, types.FunctionType]]:
    out: dict[tuple[str, str], tuple[types.ModuleType, str, types.FunctionType]] = {}
    todo = [m for m in _methods(cls) if m is not None]
    seen: set[int] = set()
    while todo:
        function = inspect.unwrap(todo.pop())
        home = sys.modules.get(getattr(function, "__module__", "") or "")
        if home is None or id(function) in seen:
            continue
        seen.add(id(function))
        for name in names_in(function):
            value = vars(home).get(name)
            if isinstance(value, types.FunctionType) and _ours(value):
                out[(home.__name__, name)] = (home, name, value)
                todo.append(value)
    return list(out.values())


def _methods(cls: type) -> list[types.FunctionType]:
    """Forward and what a class defines beside it, but for construction; torch's own classes are left out."""
    skip = {"__init__", "_init_weights", "from_pretrained", "generate"}
    return [
        inspect.unwrap(v)
        for c in cls.__mro__
        if c is not nn.Module
        and not c.__module__.startswith("torch")
        and issubclass(c, nn.Module)
        and "modeling_utils" not in c.__module__
        for n, v in vars(c).items()
        if isinstance(v, types.FunctionType) and n not in skip
    ]


def _ours(value: types.FunctionType) -> bool:
    root = (value.__module__ or "").partition(".")[0]
    return root not in ("torch", "typing", "functools", "logging", "warnings", "math", "collections", "dataclasses")
