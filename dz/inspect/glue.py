"""Does a forward compute, or does it only pass things on? Read from its source, for modules that no op recognises."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from torch import nn

from dz.ops._live import Unreadable, source

# Names of calls that work on numbers. Moving, viewing, joining and adding a residual is passing on.
WORK = frozenset(
    {
        "argsort",
        "avg_pool2d",
        "bilinear",
        "bmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "cos",
        "cumsum",
        "einsum",
        "embedding",
        "exp",
        "gather",
        "gelu",
        "index_add",
        "index_add_",
        "interpolate",
        "layer_norm",
        "linear",
        "log",
        "log_softmax",
        "logsumexp",
        "matmul",
        "max_pool2d",
        "mean",
        "normalize",
        "polar",
        "pow",
        "relu",
        "rms_norm",
        "rsqrt",
        "scaled_dot_product_attention",
        "sigmoid",
        "silu",
        "sin",
        "softmax",
        "softplus",
        "sort",
        "sqrt",
        "square",
        "sum",
        "tanh",
        "topk",
        "unfold",
    }
)
_OPERATORS = {ast.MatMult: "matmul", ast.Mult: "a product", ast.Div: "a quotient", ast.Pow: "a power"}


def work(function: Any) -> list[str]:
    """What a function computes itself, in words; empty when it only passes things on. A source that cannot be read
    counts as work."""
    try:
        body = source(inspect.unwrap(function))
    except (Unreadable, AttributeError) as e:
        return [f"unreadable: {e}"]
    found: set[str] = set()
    numbers = _number_names(body)
    for n in ast.walk(body):
        if isinstance(n, ast.Call):
            name = (
                n.func.attr if isinstance(n.func, ast.Attribute) else n.func.id if isinstance(n.func, ast.Name) else ""
            )
            if name in WORK and not _of_self(n.func):
                found.add(name)
        elif (
            isinstance(n, ast.BinOp)
            and type(n.op) in _OPERATORS
            and not (_plain(n.left, numbers) and _plain(n.right, numbers))
        ):
            found.add(_OPERATORS[type(n.op)])
    return sorted(found)


def forward_work(module: nn.Module) -> list[str]:
    """`work` of a module's forward and of the methods that it calls on itself."""
    cls = type(module)
    found = set(work(cls.forward))
    try:
        body = source(inspect.unwrap(cls.forward))
    except (Unreadable, AttributeError):
        return sorted(found)
    for n in ast.walk(body):
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and _of_self(n.func):
            method = inspect.getattr_static(cls, n.func.attr, None)
            if inspect.isfunction(method):
                found.update(work(method))
    return sorted(found)


def _of_self(f: ast.expr) -> bool:
    return isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == "self"


def _number_names(body: ast.FunctionDef) -> set[str]:
    """Locals that hold sizes: what is unpacked from a shape, and what is computed from such."""
    out: set[str] = set()
    for n in ast.walk(body):
        if isinstance(n, ast.Assign) and "shape" in ast.unparse(n.value):
            for t in n.targets:
                out |= {x.id for x in ast.walk(t) if isinstance(x, ast.Name)}
    return out


def _plain(e: ast.expr, numbers: set[str]) -> bool:
    """Whether an operand is a size or a number rather than a tensor."""
    if isinstance(e, ast.Constant):
        return True
    if isinstance(e, ast.Name):
        return e.id in numbers
    if isinstance(e, ast.Attribute):
        return _of_self(e) or "config" in ast.unparse(e)
    if isinstance(e, ast.BinOp):
        return _plain(e.left, numbers) and _plain(e.right, numbers)
    return isinstance(e, ast.Subscript) and "shape" in ast.unparse(e)
