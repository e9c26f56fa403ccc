"""Expression trees in a normal form: spellings of one operation (`x.pow(2)`, `x.square()`, `x * x`) are one node.

A node is a tuple whose first entry names it:
`("arg", name)` forward argument, `("param", path)` parameter or buffer, `("attr", path)` plain attribute,
`("const", v)`, `("callmod", path, *args)` call of a child module, `("cast", x, dtype)` with dtype `("dtype", name)` or
`("dtypeof", x)`,
`("add" | "mul" | ..., a, b)`, `("tuple", ...)`, `("item", x, i)`, `("part", x, i, n, dim)` the i-th of n equal parts,
`("if", test, a, b)`, and `(operation, *tensors, ("kw", ((name, node), ...)))` for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Node = tuple[Any, ...]
NONE: Node = ("const", None)
LAST: Node = ("const", -1)
COMMUTATIVE = ("add", "mul")
_SAME = frozenset({"contiguous", "detach", "clone", "requires_grad_"})
_CASTS = {
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "double": "float64",
    "bool": "bool",
    "int": "int32",
    "long": "int64",
}
# How many tensors come first, and the names of the positional arguments after them: `mean(-1, True)` and
# `mean(dim=-1, keepdim=True)` are one node.
_SIGNATURES: dict[str, tuple[int, tuple[str, ...]]] = {
    "mean": (1, ("dim", "keepdim")),
    "sum": (1, ("dim", "keepdim")),
    "softmax": (1, ("dim",)),
    "chunk": (1, ("chunks", "dim")),
    "split": (1, ("sizes", "dim")),
    "unsqueeze": (1, ("dim",)),
    "squeeze": (1, ("dim",)),
    "cat": (1, ("dim",)),
    "stack": (1, ("dim",)),
    "topk": (1, ("k", "dim", "largest", "sorted")),
    "linear": (1, ("weight", "bias")),
    "clamp": (1, ("min", "max")),
    "embedding": (1, ("weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")),
    "layer_norm": (1, ("normalized_shape", "weight", "bias", "eps")),
    "rms_norm": (1, ("normalized_shape", "weight", "eps")),
    "repeat_interleave": (1, ("repeats", "dim")),
    "gelu": (1, ("approximate",)),
    "flatten": (1, ("start_dim", "end_dim")),
    "gather": (1, ("dim", "index")),
    "transpose": (1, ("dim0", "dim1")),
    "norm": (1, ("p", "dim", "keepdim")),
    "conv1d": (1, ("weight", "bias", "stride", "padding", "dilation", "groups")),
    "one_hot": (1, ("num_classes",)),
}
_RENAMED = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "concat": "cat",
    "concatenate": "cat",
    "clip": "clamp",
    "special_expit": "sigmoid",
    "bitwise_and": "bitand",
    "bitwise_right_shift": "rshift",
    "view": "reshape",
    "special_softmax": "softmax",
}
_ARITHMETIC = ("add", "sub", "mul", "div", "pow", "matmul")
_KEEPS_DTYPE = (
    "reshape",
    "unsqueeze",
    "transpose",
    "getitem",
    "neg",
    "flatten",
    "permute",
    "part",
    "stride",
    "squeeze",
)
_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "pow": lambda a, b: a**b,
}


def operation(name: str, args: list[Node], keywords: dict[str, Node]) -> Node:
    """The node of a tensor operation, whatever its spelling."""
    name = _RENAMED.get(name, name)
    if args and name in _SAME:
        return args[0]
    if len(args) == 1 and not keywords and name in _CASTS:
        return cast(args[0], ("dtype", _CASTS[name]))
    if args and name in ("to", "type", "type_as"):
        return _to(args, keywords)
    if args and name == "size":
        return ("shape", args[0]) if len(args) == 1 else item(("shape", args[0]), args[1])
    if name in _ARITHMETIC and len(args) == 2:
        return binary(name, args[0], args[1])
    tensors, names = _SIGNATURES.get(name, (len(args), ()))
    named = dict(zip(names, args[tensors:], strict=False)) | keywords
    if name in ("softmax", "mean", "sum") and named.get("dtype", NONE)[0] == "dtype":
        args = [cast(args[0], named.pop("dtype")), *args[1:]]
    named = {k: v for k, v in named.items() if v != NONE and k != "inplace"}
    out = (name, *args[:tensors])
    return (*out, ("kw", tuple(sorted(named.items())))) if named else out


def binary(name: str, a: Node, b: Node) -> Node:
    """A binary operation; commutative operands in a fixed order, powers and reciprocals in one spelling."""
    if a[0] == b[0] == "const" and name in _FOLD and all(isinstance(x[1], (int, float)) for x in (a, b)):
        return ("const", _FOLD[name](a[1], b[1]))
    if name == "pow" and b[0] == "const" and b[1] in (2, -0.5, 0.5):
        return ({2: "square", -0.5: "rsqrt", 0.5: "sqrt"}[b[1]], a)
    if name == "div" and b[0] == "sqrt":
        return ("rsqrt", b[1]) if a in (("const", 1), ("const", 1.0)) else binary("mul", a, ("rsqrt", b[1]))
    if name == "mul":
        if a == b:
            return ("square", a)
        for x, y in ((a, b), (b, a)):
            if y == ("sigmoid", x):
                return ("silu", x)
    if name in COMMUTATIVE and repr(b) < repr(a):
        a, b = b, a
    return (name, a, b)


def cast(x: Node, dtype: Node) -> Node:
    """`x` in `dtype`; a cast to what it already is vanishes."""
    return x if dtype_of(x) == dtype else ("cast", x, dtype)


def dtype_of(x: Node) -> Node:
    """The dtype of a node: known for casts, symbolic otherwise."""
    if x[0] == "cast":
        return x[2]
    return dtype_of(x[1]) if x[0] in _KEEPS_DTYPE else ("dtypeof", x)


def item(x: Node, i: Any) -> Node:
    """Element `i` of a tuple, of equal chunks, or of anything else."""
    i = i[1] if isinstance(i, tuple) and i[0] == "const" else i
    if not isinstance(i, int):
        return ("item", x, i if isinstance(i, tuple) else ("const", i))
    if x[0] == "tuple" and -len(x) < i < len(x) - 1:
        return x[1:][i]
    if x[0] == "chunk":
        n = keyword(x, "chunks")
        if n is not None and n[0] == "const":
            return ("part", x[1], ("const", i % n[1]), n, keyword(x, "dim") or ("const", 0))
    return ("item", x, ("const", i))


def index(x: Node, parts: tuple[Node, ...]) -> Node:
    """An indexed tensor; halves and strided slices of the last axis get names of their own."""
    if len(parts) == 2 and parts[0] == ("const", ...) and parts[1][0] == "slice":
        low, high, step = parts[1][1:]
        half = ("floordiv", item(("shape", x), -1), ("const", 2))
        if step == ("const", 2) and high == NONE and low in (NONE, ("const", 0), ("const", 1)):
            return ("stride", x, ("const", low[1] or 0), ("const", 2))
        if step in (NONE, ("const", 1)):
            if low in (NONE, ("const", 0)) and high == half:
                return ("part", x, ("const", 0), ("const", 2), LAST)
            if low == half and high == NONE:
                return ("part", x, ("const", 1), ("const", 2), LAST)
    return ("getitem", x, *parts)


def keyword(x: Node, name: str) -> Node | None:
    """A keyword argument of an operation node."""
    last = x[-1]
    return dict(last[1]).get(name) if isinstance(last, tuple) and last and last[0] == "kw" else None


def walk(x: Any) -> list[Node]:
    """Every node of a tree, itself first."""
    out: list[Node] = []
    todo = [x]
    while todo:
        n = todo.pop()
        if isinstance(n, tuple):
            if n and isinstance(n[0], str):
                out.append(n)
            todo.extend(reversed(n))
    return out


def match(pattern: Any, node: Any, found: dict[str, Node] | None = None) -> dict[str, Node] | None:
    """Unify `pattern` with `node`: `("?", name)` takes any node, the same one everywhere; commutative operands are
    tried both ways. Returns what the names took, or None."""
    found = dict(found or {})
    if isinstance(pattern, tuple) and pattern[:1] == ("?",):
        return found if found.setdefault(pattern[1], node) == node else None
    if not isinstance(pattern, tuple):
        return found if pattern == node and type(pattern) is type(node) else None
    if not isinstance(node, tuple) or len(pattern) != len(node):
        return None
    if pattern and pattern[0] in COMMUTATIVE and node[0] == pattern[0]:
        for a, b in ((node[1], node[2]), (node[2], node[1])):
            first = match(pattern[1], a, found)
            second = match(pattern[2], b, first) if first is not None else None
            if second is not None:
                return second
        return None
    for p, n in zip(pattern, node, strict=True):
        step = match(p, n, found)
        if step is None:
            return None
        found = step
    return found


def find(pattern: Any, node: Any) -> tuple[Node, dict[str, Node]] | None:
    """The first place in `node` where `pattern` fits, and what its names took."""
    for n in walk(node):
        got = match(pattern, n)
        if got is not None:
            return n, got
    return None


def _to(args: list[Node], keywords: dict[str, Node]) -> Node:
    x = args[0]
    for want in [*args[1:], *(v for k, v in keywords.items() if k in ("dtype", "other"))]:
        if want[0] in ("dtype", "dtypeof"):
            return cast(x, want)
        if want[0] in ("arg", "param", "callmod"):
            return cast(x, dtype_of(want))
    return x
