"""What a place takes, gives and keeps: from its signature, its source, and a run on meta where one reached it."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from torch import nn

from dz.core.difference import Tensors
from dz.core.inventory import Site
from dz.inspect.syntax import Piece
from dz.ops._forward import facts

_STATES = ("state", "cache", "past")
_INPUTS = ("hidden_states", "output_", "query_states", "key_states", "value_states", "inputs_", "input_")
_SHOWN = 6


def arguments(target: Any) -> list[str]:
    """The names of a forward's or function's arguments that have no default."""
    function = type(target).forward if isinstance(target, nn.Module) else target
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [p.name for p in found if p.kind in kinds and p.default is p.empty and p.name != "self"]


def tensors(target: Any, piece: Piece | None, traced: tuple[tuple[str, ...], ...] | None) -> Tensors:
    """Inputs and outputs, traced if a run reached the place, else as declared."""
    if traced is not None:
        return Tensors(inputs=traced[0], outputs=traced[1], traced=True)
    function = type(target).forward if isinstance(target, nn.Module) else target
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    inputs = tuple(str(p) for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD)
    return Tensors(inputs=inputs, outputs=_returns(piece))


def state(target: Any, piece: Piece | None, site: Site) -> str:
    """What a place keeps from call to call, in words; "none" when it keeps nothing that its source shows."""
    found = []
    f = facts(target) if isinstance(target, nn.Module) else None
    if f is not None and f.cache is not None:
        found += [f"calls {c} on {f.cache}" for c in sorted(f.cache_calls)]
        found += [f"reads {f.cache}.{r}" for r in sorted(f.reaches - f.cache_calls)]
        found += [f"hands {f.cache} to {h}" for h in sorted(f.hands)]
    if piece is not None:
        found += [f"sets self.{n} in each call" for n in sorted(_own_writes(piece))]
        found += _passed(piece) if site.kind == "function" else []
    if site.mixer is not None and site.mixer.state != "other":
        found.insert(0, f"{site.mixer.state} state for each sequence")
    return "; ".join(found) or "none"


def _returns(piece: Piece | None) -> tuple[str, ...]:
    """The distinct results of the first function, as written."""
    if piece is None:
        return ()
    own = [n for n in ast.walk(piece.functions[0]) if isinstance(n, ast.Return) and n.value is not None]
    texts = [" ".join(ast.unparse(n.value).split()) for n in own if n.value is not None]
    return tuple(dict.fromkeys(t if len(t) <= 80 else t[:77] + "..." for t in texts))[:_SHOWN]


def _own_writes(piece: Piece) -> set[str]:
    out = set()
    for f in piece.functions:
        for n in ast.walk(f):
            targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AugAssign) else []
            out |= {
                t.attr
                for t in targets
                if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == "self"
            }
    return out


def _passed(piece: Piece) -> list[str]:
    """State that a function takes, gives back, or writes into."""
    f = piece.functions[0]
    names = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    out = [f"takes {n}" for n in names if any(s in n for s in _STATES) and not n.startswith(_INPUTS)]
    written = {
        n.func.value.id
        for n in ast.walk(f)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr.endswith("_")
        and isinstance(n.func.value, ast.Name)
    }
    return out + [f"writes into {n}" for n in names if n in written]
