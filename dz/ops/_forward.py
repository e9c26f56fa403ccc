"""Facts about a mixer's forward, from its source: the attention interface it calls and what it does with its cache."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dz.ops._live import Unreadable, source

CACHE_NAMES = ("past_key_values", "past_key_value", "cache_params", "cache", "layer_past")
_OWN = (
    "self",
    "hidden_states",
    "position_embeddings",
    "attention_mask",
    "cache_position",
    "position_ids",
    "use_cache",
    "output_attentions",
    "kwargs",
)


@dataclass(slots=True)
class Facts:
    """`keywords` of the interface call with their live values (None where only a run knows them); `cache` is the name
    of the cache argument, `cache_calls` what is called on it, `reaches` attributes read from it, `hands` the children
    that receive it; `takes` are arguments beyond the usual ones; `eager` is the default passed to the interface."""

    interface: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)
    cache: str | None = None
    cache_calls: set[str] = field(default_factory=set)
    reaches: set[str] = field(default_factory=set)
    hands: set[str] = field(default_factory=set)
    takes: tuple[str, ...] = ()
    mask_changed: bool = False
    returns: int = 1
    eager: str | None = None


def facts(module: torch.nn.Module) -> Facts | None:
    """The facts of a module's forward and of the methods it calls on itself; None when its source is not there."""
    function = inspect.unwrap(type(module).forward)
    try:
        bodies = [source(function), *_methods(module, source(function))]
    except (Unreadable, AttributeError):
        return None
    out = Facts()
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    out.cache = next((n for n, p in parameters.items() if n in CACHE_NAMES or "Cache" in str(p.annotation)), None)
    usual = {*_OWN, out.cache}
    first = next(iter(list(parameters)[1:]), None)
    out.takes = tuple(n for n, p in parameters.items() if n not in usual and n != first and p.kind is not p.VAR_KEYWORD)
    for body in bodies:
        _read(module, function, body, out)
    out.returns = max(
        (
            len(n.value.elts)
            for n in ast.walk(bodies[0])
            if isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple)
        ),
        default=1,
    )
    return out


def _methods(module: torch.nn.Module, body: ast.FunctionDef) -> list[ast.FunctionDef]:
    out = []
    for n in ast.walk(body):
        if (
            isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and isinstance(n.func.value, ast.Name)
            and n.func.value.id == "self"
        ):
            method = inspect.getattr_static(type(module), n.func.attr, None)
            if inspect.isfunction(method):
                out.append(source(inspect.unwrap(method)))
    return out


def _read(module: Any, function: Any, body: ast.FunctionDef, out: Facts) -> None:
    table = {n for n in ast.walk(body) if isinstance(n, ast.Name) and _is_interface(function.__globals__.get(n.id))}
    handles: set[str] = set()
    for n in ast.walk(body):
        if not isinstance(n, (ast.Assign, ast.AnnAssign)) or n.value is None:
            continue
        targets = n.targets if isinstance(n, ast.Assign) else [n.target]
        if table.intersection(ast.walk(n.value)):
            handles |= {t.id for t in targets if isinstance(t, ast.Name)}
            for call in ast.walk(n.value):
                if isinstance(call, ast.Call) and len(call.args) == 2 and isinstance(call.args[1], ast.Name):
                    out.eager = call.args[1].id
        if any(isinstance(t, ast.Name) and t.id == "attention_mask" for t in targets):
            out.mask_changed = True
    for n in ast.walk(body):
        if isinstance(n, ast.Call):
            if isinstance(n.func, ast.Name) and n.func.id in handles and n.args and ast.unparse(n.args[0]) == "self":
                out.interface = True
                out.keywords |= {k.arg: _live(module, k.value) for k in n.keywords if k.arg}
            _cache_call(n, out)
        elif isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == out.cache:
            out.reaches.add(n.attr)


def _is_interface(value: Any) -> bool:
    """The attention interface by what it is: a table of functions that has an entry for sdpa."""
    try:
        return isinstance(value, Mapping) and "sdpa" in value
    except TypeError:
        return False


def _cache_call(n: ast.Call, out: Facts) -> None:
    if out.cache is None:
        return
    if isinstance(n.func, ast.Attribute) and isinstance(n.func.value, ast.Name) and n.func.value.id == out.cache:
        out.cache_calls.add(n.func.attr)
    given = [a.id for a in n.args if isinstance(a, ast.Name)] + [
        k.value.id for k in n.keywords if isinstance(k.value, ast.Name)
    ]
    if (
        out.cache in given
        and isinstance(n.func, ast.Attribute)
        and isinstance(n.func.value, ast.Name)
        and n.func.value.id == "self"
    ):
        out.hands.add(n.func.attr)


def _live(module: Any, e: ast.expr) -> Any:
    """The value of `self.a.b`, of a literal, or of `x if self.training else y` in evaluation; None otherwise."""
    if isinstance(e, ast.Constant):
        return e.value
    if isinstance(e, ast.IfExp):
        test = ast.unparse(e.test)
        return _live(module, e.orelse if test == "self.training" else e.body) if "self.training" in test else None
    parts = ast.unparse(e).split(".")
    if parts[0] != "self" or not all(p.isidentifier() for p in parts):
        return None
    for p in parts[1:]:
        module = getattr(module, p, None)
    return module
