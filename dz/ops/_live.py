"""Live objects met while source is read: what decides a branch, what becomes a node, what an attribute is."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from dz.ops._tree import Node, dtype_of, item


class Unreadable(Exception):
    """Why a function has no expression tree: a loop, an in-place write, too many branches."""


@dataclass(slots=True)
class Tree:
    """A function's result as a node; `children` are the modules it calls and `functions` the helpers it follows."""

    root: Node
    arguments: tuple[str, ...]
    children: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A live object met while reading; `path` is its dotted place below the module ("": itself), None elsewhere."""

    value: Any
    path: str | None = None


@functools.lru_cache(4096)
def source(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function. Raises Unreadable when its source is not there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as e:
        raise Unreadable(f"the source of {function.__qualname__} cannot be read: {e}") from e
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise Unreadable(f"{function.__qualname__} is not a plain function")
    return node


def concrete(v: Any) -> bool:
    """Whether a value decides a branch: a constant, or a live object that is no tensor."""
    return not isinstance(v.value, torch.Tensor) if isinstance(v, Known) else v[0] == "const"


def plain(v: Any) -> Any:
    return v.value if isinstance(v, Known) else v[1]


def as_node(v: Any) -> Node:
    if not isinstance(v, Known):
        return v
    x = v.value
    if isinstance(x, torch.dtype):
        return ("dtype", str(x).removeprefix("torch."))
    if isinstance(x, torch.Tensor):
        return ("param", v.path) if v.path else ("const", "tensor")
    if v.path and not isinstance(x, torch.nn.Module):
        return ("attr", v.path)
    if x is None or isinstance(x, (bool, int, float, str)):
        return ("const", x)
    if isinstance(x, (tuple, list)):
        return ("tuple", *(as_node(Known(i)) for i in x))
    return ("object", v.path or getattr(x, "__name__", type(x).__name__))


def name_of(f: Any) -> str:
    return getattr(f, "__name__", type(f).__name__).removeprefix("_")


def attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, Known):
        try:
            found = getattr(owner.value, name)
        except AttributeError:
            return ("opaque", f"{owner.path}.{name}")
        except Exception as e:
            raise Unreadable(f"reading .{name} fails: {e}") from e
        return Known(found, None if owner.path is None else f"{owner.path}.{name}".lstrip("."))
    if name == "dtype":
        return dtype_of(owner)
    if name in ("shape", "device", "ndim"):
        return (name, owner)
    if name == "data":
        return owner
    if name in ("values", "indices") and owner[0] in ("topk", "max", "min", "sort"):
        return item(owner, int(name == "indices"))
    return ("field", owner, ("const", name))


def parameters(function: Any) -> list[str]:
    if not isinstance(function, types.FunctionType):
        raise Unreadable(f"{getattr(function, '__name__', function)!r} is not a Python function")
    return list(inspect.signature(function, follow_wrapped=False).parameters)
