"""Python source of a forward, read as one expression tree in a normal form.

Locals are inlined, helper functions and methods are followed, attributes of the live module are known values, branches
on known values are taken, commutative operands are ordered, and spellings of one operation (`x.pow(2)`, `x.square()`,
`x * x`) become one node. Nothing of the model is run. What cannot be read raises `Unreadable` with the reason.

A node is a tuple whose first entry names it:
`("arg", name)` forward argument, `("param", path)` parameter or buffer, `("attr", path)` plain attribute, `("const", v)`,
`("callmod", path, *args)` call of a child module, `("cast", x, dtype)` with dtype `("dtype", name)` or `("dtypeof", x)`,
`("add" | "mul" | ..., a, b)`, `("tuple", ...)`, `("if", test, a, b)`, `(operation, *tensors, ("kw", ((name, node), ...)))`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Node = tuple[Any, ...]
COMMUTATIVE = ("add", "mul")
_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul", ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.BitAnd: "bitand", ast.BitOr: "bitor", ast.BitXor: "bitxor", ast.RShift: "rshift", ast.LShift: "lshift"}  # fmt: skip
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Is: "is", ast.IsNot: "isnot", ast.In: "in", ast.NotIn: "notin"}  # fmt: skip
_SAME = frozenset({"contiguous", "detach", "clone", "requires_grad_"})
_CASTS = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64", "bool": "bool", "int": "int32", "long": "int64"}  # fmt: skip
# Positional arguments after the tensors, so that `mean(-1, True)` and `mean(dim=-1, keepdim=True)` are one node.
_SIGNATURES: dict[str, tuple[int, tuple[str, ...]]] = {
    "mean": (1, ("dim", "keepdim")), "sum": (1, ("dim", "keepdim")), "softmax": (1, ("dim",)), "chunk": (1, ("chunks", "dim")), "split": (1, ("sizes", "dim")),
    "unsqueeze": (1, ("dim",)), "squeeze": (1, ("dim",)), "cat": (1, ("dim",)), "stack": (1, ("dim",)), "topk": (1, ("k", "dim", "largest", "sorted")), "linear": (1, ("weight", "bias")),
    "embedding": (1, ("weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")), "layer_norm": (1, ("normalized_shape", "weight", "bias", "eps")),
    "rms_norm": (1, ("normalized_shape", "weight", "eps")), "clamp": (1, ("min", "max")), "repeat_interleave": (1, ("repeats", "dim")), "gelu": (1, ("approximate",)), "flatten": (1, ("start_dim", "end_dim")),
    "gather": (1, ("dim", "index")), "transpose": (1, ("dim0", "dim1")), "norm": (1, ("p", "dim", "keepdim")), "normalize": (1, ("p", "dim", "eps")),
}  # fmt: skip
_RENAMED = {"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "negative": "neg", "concat": "cat", "concatenate": "cat", "clip": "clamp", "special_expit": "sigmoid", "bitwise_and": "bitand", "bitwise_right_shift": "rshift"}  # fmt: skip
_BRANCHES = 24
_DEPTH = 6


class Unreadable(Exception):
    """Why a function has no expression tree: a loop, an in-place write, too many branches."""


@dataclass(slots=True)
class Tree:
    """A function's result as a node; `children` are the modules that it calls and `functions` the helpers it follows."""

    root: Node
    arguments: tuple[str, ...]
    children: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)


def read(target: Any) -> Tree:
    """The tree of a module's forward (a live `nn.Module`) or of a function. Raises Unreadable."""
    reader = _Reader()
    if isinstance(target, torch.nn.Module):
        function = inspect.unwrap(type(target).forward)
        names = _parameters(function)
        env = {names[0]: _Known(target, ""), **{n: ("arg", n) for n in names[1:]}}
        arguments = tuple(names[1:])
    else:
        function = inspect.unwrap(target)
        names = _parameters(function)
        env, arguments = {n: ("arg", n) for n in names}, tuple(names)
    root = reader.function(function, env, 0)
    return Tree(root, arguments, reader.children, reader.functions)


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A live object met while reading; `path` is its dotted place below the module, None for globals."""

    value: Any
    path: str | None = None
    owner: type | None = None  # for super(): where the search goes on


def _parameters(function: Any) -> list[str]:
    if not isinstance(function, types.FunctionType):
        raise Unreadable(f"{getattr(function, '__name__', function)!r} is not a Python function")
    return list(inspect.signature(function, follow_wrapped=False).parameters)


@functools.lru_cache(4096)
def _source(function: types.FunctionType) -> ast.FunctionDef:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError) as e:
        raise Unreadable(f"the source of {function.__qualname__} cannot be read: {e}") from e
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise Unreadable(f"{function.__qualname__} is not a plain function")
    return node


class _Reader:
    def __init__(self) -> None:
        self.children: list[str] = []
        self.functions: list[str] = []
        self.branches = 0

    # -- functions and statements

    def function(self, function: Any, env: dict[str, Any], depth: int) -> Node:
        if depth > _DEPTH:
            raise Unreadable("helpers call helpers too deep")
        node = _source(function)
        scope = _Scope(self, function, env, depth)
        out = scope.block(node.body)
        return ("const", None) if out is None else out


class _Scope:
    """One function's body: its locals, its globals, and how deep it is inlined."""

    def __init__(self, reader: _Reader, function: Any, env: dict[str, Any], depth: int) -> None:
        self.reader, self.function, self.env, self.depth = reader, function, env, depth
        closure = inspect.getclosurevars(function) if function.__closure__ else None
        self.free: Mapping[str, Any] = closure.nonlocals if closure else {}

    def block(self, body: list[ast.stmt]) -> Node | None:
        for i, s in enumerate(body):
            if isinstance(s, ast.Return):
                return ("const", None) if s.value is None else self.node(s.value)
            if isinstance(s, ast.If):
                return self.branch(s, body[i + 1 :])
            if isinstance(s, ast.With):
                return self.block([*s.body, *body[i + 1 :]])
            if isinstance(s, ast.Raise):
                return ("raise",)
            self.statement(s)
        return None

    def branch(self, s: ast.If, rest: list[ast.stmt]) -> Node | None:
        test = self.value(s.test)
        if isinstance(test, _Known):
            return self.block([*(s.body if test.value else s.orelse), *rest])
        if test[0] == "const":
            return self.block([*(s.body if test[1] else s.orelse), *rest])
        self.reader.branches += 1
        if self.reader.branches > _BRANCHES:
            raise Unreadable("too many branches on values that only a run knows")
        saved = dict(self.env)
        yes = self.block([*s.body, *rest]) or ("const", None)
        self.env = saved
        no = self.block([*s.orelse, *rest]) or ("const", None)
        if yes == ("raise",) or yes == no:
            return no
        return yes if no == ("raise",) else ("if", test, yes, no)

    def statement(self, s: ast.stmt) -> None:
        if isinstance(s, ast.Assign):
            value = self.value(s.value)
            for target in s.targets:
                self.assign(target, value)
        elif isinstance(s, ast.AnnAssign):
            if s.value is not None:
                self.assign(s.target, self.value(s.value))
        elif isinstance(s, ast.AugAssign):
            if not isinstance(s.target, ast.Name):
                raise Unreadable("it writes into a tensor in place")
            left = self.node(ast.copy_location(ast.Name(s.target.id, ast.Load()), s.target))
            self.env[s.target.id] = binary(_BINARY.get(type(s.op), "op"), left, self.node(s.value))
        elif isinstance(s, ast.Expr):
            if not isinstance(s.value, ast.Constant) and not _harmless(s.value):
                raise Unreadable(f"`{ast.unparse(s.value)[:60]}` has an effect")
        elif isinstance(s, (ast.For, ast.While, ast.Try)):
            raise Unreadable(f"it has a {type(s).__name__.lower()} statement")
        elif not isinstance(s, (ast.Pass, ast.Assert, ast.Import, ast.ImportFrom, ast.Global)):
            raise Unreadable(f"it has a {type(s).__name__.lower()} statement")

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            if isinstance(value, _Known):
                value = self.as_node(value)
            starred = any(isinstance(e, ast.Starred) for e in target.elts)
            for i, e in enumerate(target.elts):
                inner = e.value if isinstance(e, ast.Starred) else e
                self.assign(inner, ("item", value, ("const", i)) if starred else item(value, i))
        else:
            raise Unreadable("it writes into a tensor or an attribute")

    # -- expressions: a `_Known` is a live object, everything else a node

    def node(self, e: ast.expr) -> Node:
        return self.as_node(self.value(e))

    def as_node(self, v: Any) -> Node:
        if not isinstance(v, _Known):
            return v
        x = v.value
        if isinstance(x, torch.Tensor):
            return ("param", v.path) if v.path else ("const", "tensor")
        if isinstance(x, torch.dtype):
            return ("dtype", str(x).removeprefix("torch."))
        if v.path and not isinstance(x, torch.nn.Module):
            return ("attr", v.path)
        if x is None or isinstance(x, (bool, int, float, str)):
            return ("const", x)
        if isinstance(x, (tuple, list)):
            return ("tuple", *(self.as_node(_Known(i)) for i in x))
        return ("object", v.path or getattr(x, "__name__", type(x).__name__))

    def value(self, e: ast.expr) -> Any:  # noqa: C901  one dispatch over expression kinds
        if isinstance(e, ast.Constant):
            return ("const", e.value)
        if isinstance(e, ast.Name):
            return self.name(e.id)
        if isinstance(e, ast.Attribute):
            return self.attribute(self.value(e.value), e.attr)
        if isinstance(e, ast.Call):
            return self.call(e)
        if isinstance(e, ast.BinOp):
            return binary(_BINARY.get(type(e.op), "op"), self.node(e.left), self.node(e.right))
        if isinstance(e, ast.UnaryOp):
            return self.unary(e)
        if isinstance(e, ast.Compare):
            return self.compare(e)
        if isinstance(e, ast.BoolOp):
            return self.boolean(e)
        if isinstance(e, ast.IfExp):
            test = self.value(e.test)
            known = test.value if isinstance(test, _Known) else test[1] if test[0] == "const" else None
            if isinstance(test, _Known) or test[0] == "const":
                return self.value(e.body if known else e.orelse)
            return ("if", test, self.node(e.body), self.node(e.orelse))
        if isinstance(e, (ast.Tuple, ast.List)):
            return ("tuple", *(self.node(x.value if isinstance(x, ast.Starred) else x) for x in e.elts))
        if isinstance(e, ast.Subscript):
            return self.subscript(e)
        if isinstance(e, ast.NamedExpr):
            self.env[e.target.id] = self.value(e.value)
            return self.env[e.target.id]
        return ("opaque", ast.unparse(e))

    def name(self, name: str) -> Any:
        for table in (self.env, self.free):
            if name in table:
                found = table[name]
                return found if isinstance(found, (tuple, _Known)) and table is self.env else _Known(found)
        if name in self.function.__globals__:
            return _Known(self.function.__globals__[name])
        return _Known(getattr(builtins, name)) if hasattr(builtins, name) else ("opaque", name)

    def attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, _Known):
            if owner.owner is not None:
                return _Known((owner.value, owner.owner, name), "super")
            try:
                found = getattr(owner.value, name)
            except AttributeError:
                return ("opaque", f"{owner.path}.{name}")
            except Exception as e:
                raise Unreadable(f"reading .{name} fails: {e}") from e
            return _Known(found, None if owner.path is None else f"{owner.path}.{name}".lstrip("."))
        if name == "dtype":
            return dtype_of(owner)
        if name in ("shape", "device", "ndim", "data"):
            return owner if name == "data" else (name, owner)
        if name in ("values", "indices") and owner[0] in ("topk", "max", "min", "sort"):
            return item(owner, int(name == "indices"))
        return ("field", owner, ("const", name))

    def unary(self, e: ast.UnaryOp) -> Any:
        inner = self.value(e.operand)
        if isinstance(e.op, ast.Not):
            known = isinstance(inner, _Known) or inner[0] == "const"
            return ("const", not (inner.value if isinstance(inner, _Known) else inner[1])) if known else ("not", inner)
        node = self.as_node(inner)
        if isinstance(e.op, ast.USub):
            return ("const", -node[1]) if node[0] == "const" and isinstance(node[1], (int, float)) else ("neg", node)
        return ("invert" if isinstance(e.op, ast.Invert) else "pos", node)

    def compare(self, e: ast.Compare) -> Any:
        left, right, op = self.value(e.left), self.value(e.comparators[0]), _COMPARE.get(type(e.ops[0]), "cmp")
        if len(e.ops) == 1 and _concrete(left) and _concrete(right):
            a, b = _plain(left), _plain(right)
            table = {"is": a is b or (a is None) is (b is None) is True, "isnot": a is not b and not (a is None and b is None)}
            try:
                return ("const", bool(table[op]) if op in table else _compare(op, a, b))
            except (TypeError, ValueError, RuntimeError):
                return ("opaque", ast.unparse(e))
        return (op, self.as_node(left), self.as_node(right))

    def boolean(self, e: ast.BoolOp) -> Any:
        stop = isinstance(e.op, ast.Or)
        rest = []
        for v in map(self.value, e.values):
            if not _concrete(v):
                rest.append(self.as_node(v))
            elif bool(_truth(v)) is stop:
                if not rest:
                    return v
                rest.append(self.as_node(v))
        if not rest:
            return ("const", not stop)
        return rest[0] if len(rest) == 1 else ("or" if stop else "and", *rest)

    def subscript(self, e: ast.Subscript) -> Any:
        owner = self.value(e.value)
        if isinstance(owner, _Known) and not isinstance(owner.value, torch.Tensor):
            index = self.value(e.slice)
            if _concrete(index):
                try:
                    return _Known(owner.value[_plain(index)], None)
                except (KeyError, IndexError, TypeError):
                    return ("opaque", ast.unparse(e))
        base = self.as_node(owner)
        if isinstance(e.slice, ast.Constant) and isinstance(e.slice.value, int):
            return item(base, e.slice.value)
        return index_node(base, self.slices(e.slice))

    def slices(self, s: ast.expr) -> tuple[Node, ...]:
        parts = s.elts if isinstance(s, ast.Tuple) else [s]
        out: list[Node] = []
        for p in parts:
            if isinstance(p, ast.Slice):
                out.append(("slice", *(("const", None) if x is None else self.node(x) for x in (p.lower, p.upper, p.step))))
            else:
                out.append(self.node(p))
        return tuple(out)

    # -- calls

    def call(self, e: ast.Call) -> Any:
        if isinstance(e.func, ast.Name) and e.func.id == "super" and not e.args:
            me = next(v for v in self.env.values() if isinstance(v, _Known))
            return _Known(me.value, me.path, _defining(type(me.value), self.function))
        callee = self.value(e.func) if not isinstance(e.func, ast.Attribute) else None
        if isinstance(e.func, ast.Attribute):
            owner = self.value(e.func.value)
            if not isinstance(owner, _Known) or isinstance(owner.value, torch.Tensor):
                return self.operation(e.func.attr, [self.as_node(owner)], e)
            callee = self.attribute(owner, e.func.attr)
        if not isinstance(callee, _Known):
            return ("apply", callee, *(self.node(a) for a in e.args), self.keywords(e))
        return self.known_call(callee, e)

    def keywords(self, e: ast.Call) -> Node:
        return ("kw", tuple(sorted((k.arg or "**", self.node(k.value)) for k in e.keywords)))

    def known_call(self, callee: _Known, e: ast.Call) -> Any:
        f = callee.value
        if callee.path == "super" and isinstance(f, tuple):
            me, after, name = f
            mro = type(me).__mro__
            method = next(vars(c)[name] for c in mro[mro.index(after) + 1 :] if name in vars(c))
            return self.inline(inspect.unwrap(method), e, _Known(me, ""))
        if isinstance(f, functools.partial):
            return self.operation(_operation_name(f.func), [self.node(a) for a in e.args], e, extra=f.keywords)
        if isinstance(f, torch.nn.Module):
            return self.module_call(callee, e)
        if isinstance(f, types.MethodType) and isinstance(f.__self__, torch.nn.Module):
            path = (callee.path or "").rpartition(".")[0]
            return self.inline(inspect.unwrap(f.__func__), e, _Known(f.__self__, path))
        if f in (getattr, isinstance, len, int, float, bool, tuple, list, min, max, hasattr):
            return self.builtin(f, e)
        if isinstance(f, types.FunctionType) and not (f.__module__ or "").startswith("torch"):
            self.reader.functions.append(f.__name__)
            return self.inline(inspect.unwrap(f), e, None)
        return self.operation(_operation_name(f), [self.node(a) for a in e.args], e)

    def module_call(self, callee: _Known, e: ast.Call) -> Any:
        module, path = callee.value, callee.path
        args = [self.node(a) for a in e.args]
        leaf = not any(True for _ in module.children()) and not any(True for _ in module.parameters())
        if path:
            self.reader.children.append(path)
        if leaf and len(args) == 1 and not e.keywords:
            function = inspect.unwrap(type(module).forward)
            names = _parameters(function)
            env = {names[0]: _Known(module, path), names[1]: args[0]} if len(names) == 2 else {}
            if env:
                return self.reader.function(function, env, self.depth + 1)
        return ("callmod", path or type(module).__name__, *args, *((self.keywords(e),) if e.keywords else ()))

    def inline(self, function: Any, e: ast.Call, me: _Known | None) -> Any:
        if not isinstance(function, types.FunctionType):
            return self.operation(_operation_name(function), [self.node(a) for a in e.args], e)
        signature = inspect.signature(function, follow_wrapped=False)
        given = [*([me] if me is not None else []), *(self.value(a) for a in e.args)]
        try:
            bound = signature.bind(*given, **{k.arg: self.value(k.value) for k in e.keywords if k.arg})
        except TypeError as error:
            raise Unreadable(f"the call of {function.__name__} does not fit its signature: {error}") from error
        env = {n: p.default if isinstance(p.default, tuple) else ("const", p.default) for n, p in signature.parameters.items() if p.default is not p.empty}
        env |= bound.arguments
        return self.reader.function(function, env, self.depth + 1)

    def builtin(self, f: Any, e: ast.Call) -> Any:
        args = [self.value(a) for a in e.args]
        if f in (getattr, hasattr) and isinstance(args[0], _Known) and _concrete(args[1]):
            name = str(_plain(args[1]))
            if f is hasattr:
                return ("const", hasattr(args[0].value, name))
            if hasattr(args[0].value, name):
                return self.attribute(args[0], name)
            return args[2] if len(args) > 2 else ("opaque", name)
        if f is isinstance and isinstance(args[0], _Known):
            return ("const", isinstance(args[0].value, _plain(args[1])))
        if all(_concrete(a) for a in args) and not e.keywords and f is not isinstance:
            return ("const", f(*(_plain(a) for a in args)))
        return (f.__name__, *(self.as_node(a) for a in args))

    def operation(self, name: str, args: list[Node], e: ast.Call, extra: Mapping[str, Any] | None = None) -> Node:
        if len(args) == 1 and isinstance(e.func, ast.Attribute) and len(e.args) and args[0] not in [self.node(a) for a in e.args[:1]]:
            args = [*args, *(self.node(a) for a in e.args)]  # a method: the receiver is the first tensor
        keywords = {k.arg or "**": self.node(k.value) for k in e.keywords}
        keywords |= {k: self.as_node(_Known(v)) for k, v in (extra or {}).items()}
        return operation(name, args, keywords)


# -- the algebra of nodes


def operation(name: str, args: list[Node], keywords: dict[str, Node]) -> Node:
    """The node of a tensor operation, whatever its spelling."""
    name = _RENAMED.get(name, name)
    if name in _SAME and args:
        return args[0]
    if name in _CASTS and args and len(args) == 1:
        return cast(args[0], ("dtype", _CASTS[name]))
    if name in ("to", "type", "type_as"):
        return _to(args, keywords)
    if name in ("square",):
        return ("square", args[0])
    if name == "size" and args:
        return ("shape", args[0]) if len(args) == 1 else item(("shape", args[0]), args[1])
    if name in ("add", "sub", "mul", "div", "pow", "matmul") and len(args) == 2:
        return binary(name, args[0], args[1])
    if name in ("reshape", "view"):
        name = "reshape"
    tensors, names = _SIGNATURES.get(name, (len(args), ()))
    named = dict(zip(names, args[tensors:], strict=False)) | keywords
    if name == "softmax" and named.get("dtype", ("const", None))[0] == "dtype":
        args = [cast(args[0], named.pop("dtype")), *args[1:]]
    named = {k: v for k, v in named.items() if v != ("const", None) or k in ("bias", "weight")}
    out = (name, *args[:tensors])
    return (*out, ("kw", tuple(sorted(named.items())))) if named else out


def binary(name: str, a: Node, b: Node) -> Node:
    """A binary operation; commutative operands in a fixed order, powers and reciprocals in one spelling."""
    if a[0] == b[0] == "const" and all(isinstance(x[1], (int, float)) for x in (a, b)):
        folded = {"add": lambda: a[1] + b[1], "sub": lambda: a[1] - b[1], "mul": lambda: a[1] * b[1], "pow": lambda: a[1] ** b[1]}.get(name)
        if folded:
            return ("const", folded())
    if name == "pow":
        if b in (("const", 2), ("const", 2.0)):
            return ("square", a)
        if b == ("const", -0.5):
            return ("rsqrt", a)
        if b == ("const", 0.5):
            return ("sqrt", a)
    if name == "div" and a in (("const", 1), ("const", 1.0)) and b[0] == "sqrt":
        return ("rsqrt", b[1])
    if name == "div" and b[0] == "sqrt":
        return binary("mul", a, ("rsqrt", b[1]))
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
    if x[0] in ("reshape", "unsqueeze", "transpose", "getitem", "neg", "flatten", "permute"):
        return dtype_of(x[1])
    return ("dtypeof", x)


def item(x: Node, i: Any) -> Node:
    """Element `i` of a tuple, a chunk, or a tensor."""
    i = i[1] if isinstance(i, tuple) and i[0] == "const" else i
    if x[0] == "tuple" and isinstance(i, int) and -len(x) < i < len(x) - 1:
        return x[1:][i]
    if x[0] == "chunk":
        n, dim = keyword(x, "chunks"), keyword(x, "dim")
        if n is not None and n[0] == "const" and isinstance(i, int):
            return ("part", x[1], ("const", i % n[1]), n, dim or ("const", 0))
    return ("item", x, ("const", i) if not isinstance(i, tuple) else i)


def index_node(x: Node, parts: tuple[Node, ...]) -> Node:
    """An indexed tensor; halves and strided slices of the last axis get their own names."""
    if len(parts) == 2 and parts[0] == ("const", ...) and parts[1][0] == "slice":
        low, high, step = parts[1][1:]
        half = ("floordiv", item(("shape", x), -1), ("const", 2))
        none, last = ("const", None), ("const", -1)
        if step == ("const", 2):
            start = low[1] or 0 if low[0] == "const" else None
            if start in (0, 1) and high == none:
                return ("stride", x, ("const", start), ("const", 2))
        if step in (none, ("const", 1)):
            if low in (none, ("const", 0)) and high == half:
                return ("part", x, ("const", 0), ("const", 2), last)
            if low == half and high == none:
                return ("part", x, ("const", 1), ("const", 2), last)
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
    """Unify `pattern` with `node`: `("?", name)` takes any node, the same one everywhere; commutative operands are tried
    both ways. Returns the bindings, or None."""
    found = dict(found or {})
    if isinstance(pattern, tuple) and pattern[:1] == ("?",):
        known = found.setdefault(pattern[1], node)
        return found if known == node else None
    if not isinstance(pattern, tuple):
        return found if pattern == node and type(pattern) is type(node) else None
    if not isinstance(node, tuple) or len(pattern) != len(node):
        return None
    if pattern and pattern[0] in COMMUTATIVE and node[0] == pattern[0] and len(pattern) == 3:
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


def find(pattern: Any, node: Any) -> dict[str, Node] | None:
    """The first place in `node` where `pattern` fits."""
    for n in walk(node):
        got = match(pattern, n)
        if got is not None:
            return got
    return None


def _to(args: list[Node], keywords: dict[str, Node]) -> Node:
    x = args[0]
    for want in [*args[1:2], *(v for k, v in keywords.items() if k in ("dtype", "other"))]:
        if want[0] in ("dtype", "dtypeof"):
            return cast(x, want)
        if want[0] in ("arg", "param", "callmod"):
            return cast(x, dtype_of(want))
    return x


def _harmless(e: ast.expr) -> bool:
    return isinstance(e, ast.Call) and any(w in ast.unparse(e.func) for w in ("logger.", "warnings.", "print", "_check"))


def _concrete(v: Any) -> bool:
    return (isinstance(v, _Known) and not isinstance(v.value, torch.Tensor)) or (isinstance(v, _Known) and v.value is None) or (isinstance(v, tuple) and v[0] == "const") or isinstance(v, _Known)


def _plain(v: Any) -> Any:
    return v.value if isinstance(v, _Known) else v[1]


def _truth(v: Any) -> bool:
    x = _plain(v)
    return True if isinstance(x, (torch.Tensor, torch.nn.Module)) else bool(x)


def _compare(op: str, a: Any, b: Any) -> bool:
    table = {"eq": lambda: a == b, "ne": lambda: a != b, "lt": lambda: a < b, "le": lambda: a <= b, "gt": lambda: a > b, "ge": lambda: a >= b, "in": lambda: a in b, "notin": lambda: a not in b}
    return bool(table[op]())


def _operation_name(f: Any) -> str:
    return getattr(f, "__name__", type(f).__name__).removeprefix("_")


def _defining(cls: type, function: Any) -> type:
    for c in cls.__mro__:
        for v in vars(c).values():
            if inspect.unwrap(v) is function if callable(v) else False:
                return c
    return cls
