"""Python source of a forward, read as one expression tree (see `_tree`).

Locals are inlined, helper functions and methods are followed, attributes of the live module are known values, and
branches on known values are taken. Nothing of the model is run. What cannot be read raises `Unreadable`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch

from dz.ops._live import Known, Tree, Unreadable, as_node, attribute, concrete, name_of, parameters, plain, source
from dz.ops._tree import NONE, Node, binary, index, item, operation

_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "bitand",
    ast.BitOr: "bitor",
    ast.BitXor: "bitxor",
    ast.RShift: "rshift",
    ast.LShift: "lshift",
}
_COMPARE = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Is: "is",
    ast.IsNot: "isnot",
    ast.In: "in",
    ast.NotIn: "notin",
}
_DECIDE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "is": lambda a, b: a is b,
    "isnot": lambda a, b: a is not b,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}
_BUILTINS = (len, int, float, bool, min, max, abs, round)
_QUIET = ("logger", "warnings", "logging")
_BRANCHES = 24
_DEPTH = 6


def read(target: Any, method: str = "forward") -> Tree:
    """The tree of a method of a module (a live `nn.Module`) or of a function. Raises Unreadable."""
    tree = Tree(NONE, ())
    if isinstance(target, torch.nn.Module):
        function = inspect.unwrap(getattr(type(target), method))
        names = parameters(function)
        env: dict[str, Any] = {names[0]: Known(target, "")}
        names = names[1:]
    else:
        function, env = inspect.unwrap(target), {}
        names = parameters(function)
    tree.arguments = tuple(names)
    try:
        tree.root = _follow(tree, function, env | {n: ("arg", n) for n in names}, 0)
    except RecursionError:
        raise Unreadable("its expression is too deep") from None
    return tree


def _follow(tree: Tree, function: types.FunctionType, env: dict[str, Any], depth: int) -> Node:
    if depth > _DEPTH:
        raise Unreadable("helpers call helpers too deep")
    out = _Scope(tree, function, env, depth).block(source(function).body)
    return NONE if out is None else out


class _Scope:
    """One function's body: its locals (`Known` live objects or nodes), its globals, and how deep it is inlined."""

    def __init__(
        self, tree: Tree, function: types.FunctionType, env: dict[str, Any], depth: int, budget: int = _BRANCHES
    ) -> None:
        self.tree, self.function, self.env, self.depth, self.branches = tree, function, env, depth, budget
        self.free: Mapping[str, Any] = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}

    # -- statements

    def block(self, body: list[ast.stmt]) -> Node | None:
        for i, s in enumerate(body):
            if isinstance(s, ast.Return):
                return NONE if s.value is None else self.node(s.value)
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
        if concrete(test):
            return self.block([*(s.body if plain(test) else s.orelse), *rest])
        self.branches -= 1
        if self.branches < 0:
            raise Unreadable("too many branches on values that only a run knows")
        saved = dict(self.env)
        yes = self.block([*s.body, *rest]) or NONE
        self.env = saved
        no = self.block([*s.orelse, *rest]) or NONE
        if yes == ("raise",) or yes == no:
            return no
        return yes if no == ("raise",) else ("if", as_node(test), yes, no)

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
            self.env[s.target.id] = binary(_BINARY[type(s.op)], as_node(self.name(s.target.id)), self.node(s.value))
        elif isinstance(s, ast.Expr):
            if (
                not isinstance(s.value, ast.Constant)
                and not ast.unparse(s.value).startswith(_QUIET)
                and not self.in_place(s.value)
            ):
                raise Unreadable(f"`{ast.unparse(s.value)[:60]}` has an effect")
        elif not isinstance(s, (ast.Pass, ast.Assert, ast.Import, ast.ImportFrom)):
            raise Unreadable(f"it has a {type(s).__name__.lower()} statement")

    def in_place(self, e: ast.expr) -> bool:
        """`x.scatter_(...)` on a local: the local becomes the result. Other effects are not followed."""
        if not (isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and isinstance(e.func.value, ast.Name)):
            return False
        name, held = e.func.attr, self.env.get(e.func.value.id)
        if not name.endswith("_") or name.startswith("_") or not isinstance(held, tuple):
            return False
        self.env[e.func.value.id] = operation(name[:-1], [held, *map(self.node, e.args)], self._keywords(e))
        return True

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = value
            return
        if not isinstance(target, (ast.Tuple, ast.List)):
            raise Unreadable("it writes into a tensor or an attribute")
        node, starred = as_node(value), any(isinstance(e, ast.Starred) for e in target.elts)
        for i, e in enumerate(target.elts):
            if isinstance(e, ast.Starred):
                self.assign(e.value, ("rest", node, ("const", i)))
            else:
                self.assign(e, item(node, i - len(target.elts) if starred and i else i))

    # -- expressions

    def node(self, e: ast.expr) -> Node:
        return as_node(self.value(e))

    def value(self, e: ast.expr) -> Any:
        handler = getattr(self, f"_{type(e).__name__.lower()}", None)
        return handler(e) if handler else ("opaque", ast.unparse(e))

    def name(self, name: str) -> Any:
        if name in self.env:
            return self.env[name]
        for table in (self.free, self.function.__globals__):
            if name in table:
                return Known(table[name])
        return Known(getattr(builtins, name)) if hasattr(builtins, name) else ("opaque", name)

    def _constant(self, e: ast.Constant) -> Any:
        return ("const", e.value)

    def _name(self, e: ast.Name) -> Any:
        return self.name(e.id)

    def _attribute(self, e: ast.Attribute) -> Any:
        return attribute(self.value(e.value), e.attr)

    def _starred(self, e: ast.Starred) -> Any:
        return ("starred", self.node(e.value))

    def _tuple(self, e: ast.Tuple | ast.List) -> Any:
        return ("tuple", *(self.node(x) for x in e.elts))

    _list = _tuple

    def _namedexpr(self, e: ast.NamedExpr) -> Any:
        self.env[e.target.id] = self.value(e.value)
        return self.env[e.target.id]

    def _binop(self, e: ast.BinOp) -> Any:
        return binary(_BINARY[type(e.op)], self.node(e.left), self.node(e.right))

    def _unaryop(self, e: ast.UnaryOp) -> Any:
        inner = self.value(e.operand)
        if isinstance(e.op, ast.Not):
            return ("const", not plain(inner)) if concrete(inner) else ("not", as_node(inner))
        node = as_node(inner)
        if isinstance(e.op, ast.USub):
            return ("const", -node[1]) if node[0] == "const" and isinstance(node[1], (int, float)) else ("neg", node)
        return ("invert" if isinstance(e.op, ast.Invert) else "pos", node)

    def _compare(self, e: ast.Compare) -> Any:
        left, right, op = self.value(e.left), self.value(e.comparators[0]), _COMPARE[type(e.ops[0])]
        known = op in ("is", "isnot") and isinstance(left, Known) and right == NONE
        if len(e.ops) == 1 and (known or (concrete(left) and concrete(right))):
            try:
                return ("const", bool(_DECIDE[op](plain(left), plain(right))))
            except (TypeError, ValueError):
                return ("opaque", ast.unparse(e))
        return (op, as_node(left), as_node(right))

    def _boolop(self, e: ast.BoolOp) -> Any:
        stop, rest = isinstance(e.op, ast.Or), []
        for v in map(self.value, e.values):
            if not concrete(v):
                rest.append(as_node(v))
            elif bool(plain(v)) is stop:
                if not rest:
                    return v
                rest.append(as_node(v))
                break
        if not rest:
            return ("const", not stop)
        return rest[0] if len(rest) == 1 else ("or" if stop else "and", *rest)

    def _ifexp(self, e: ast.IfExp) -> Any:
        test = self.value(e.test)
        if concrete(test):
            return self.value(e.body if plain(test) else e.orelse)
        return ("if", as_node(test), self.node(e.body), self.node(e.orelse))

    def _subscript(self, e: ast.Subscript) -> Any:
        owner = self.value(e.value)
        if isinstance(owner, Known) and not isinstance(owner.value, torch.Tensor):
            key = self.value(e.slice)
            if concrete(key):
                try:
                    return Known(owner.value[plain(key)])
                except (KeyError, IndexError, TypeError):
                    return ("opaque", ast.unparse(e))
        if isinstance(e.slice, (ast.Constant, ast.UnaryOp)):
            return item(as_node(owner), self.node(e.slice))
        return index(as_node(owner), self._slices(e.slice))

    def _slices(self, s: ast.expr) -> tuple[Node, ...]:
        def one(p: ast.expr) -> Node:
            if isinstance(p, ast.Slice):
                return ("slice", *(NONE if x is None else self.node(x) for x in (p.lower, p.upper, p.step)))
            return self.node(p)

        return tuple(one(p) for p in (s.elts if isinstance(s, ast.Tuple) else [s]))

    # -- calls

    def _call(self, e: ast.Call) -> Any:
        if not isinstance(e.func, ast.Attribute):
            callee = self.value(e.func)
            return (
                self._known_call(callee, e) if isinstance(callee, Known) else ("apply", callee, *map(self.node, e.args))
            )
        if isinstance(e.func.value, ast.Call) and ast.unparse(e.func.value) == "super()":
            return self._super(e, e.func.attr)
        owner = self.value(e.func.value)
        if isinstance(owner, Known) and not isinstance(owner.value, torch.Tensor):
            callee = attribute(owner, e.func.attr)
            return self._known_call(callee, e) if isinstance(callee, Known) else callee
        return operation(e.func.attr, [as_node(owner), *map(self.node, e.args)], self._keywords(e))

    def _super(self, e: ast.Call, name: str) -> Node:
        me = next((v for v in self.env.values() if isinstance(v, Known) and v.path == ""), None)
        if me is None:
            raise Unreadable(f"super().{name} of a child is not followed")
        mro = type(me.value).__mro__
        here = next(
            (
                i
                for i, c in enumerate(mro)
                if any(inspect.unwrap(v) is self.function for v in vars(c).values() if callable(v))
            ),
            0,
        )
        for c in mro[here + 1 :]:
            if name in vars(c):
                return self._inline(inspect.unwrap(vars(c)[name]), e, me)
        raise Unreadable(f"super().{name} leads nowhere")

    def _keywords(self, e: ast.Call) -> dict[str, Node]:
        return {k.arg or "**": self.node(k.value) for k in e.keywords}

    def _known_call(self, callee: Known, e: ast.Call) -> Any:
        f = callee.value
        if isinstance(f, functools.partial):
            bound = {k: as_node(Known(v)) for k, v in f.keywords.items()}
            return operation(name_of(f.func), list(map(self.node, e.args)), bound | self._keywords(e))
        if isinstance(f, torch.nn.Module):
            return self._module_call(callee, e)
        if isinstance(f, types.MethodType) and isinstance(f.__self__, torch.nn.Module):
            return self._inline(
                inspect.unwrap(f.__func__), e, Known(f.__self__, (callee.path or "").rpartition(".")[0])
            )
        if f in (getattr, hasattr, isinstance) or f in _BUILTINS:
            return self._builtin(f, e)
        if isinstance(f, types.FunctionType) and not (f.__module__ or "").startswith("torch"):
            self.tree.functions.append(f.__name__)
            return self._inline(inspect.unwrap(f), e, None)
        return operation(name_of(f), list(map(self.node, e.args)), self._keywords(e))

    def _module_call(self, callee: Known, e: ast.Call) -> Any:
        module, path = callee.value, callee.path
        args = list(map(self.node, e.args))
        if path:
            self.tree.children.append(path)
        leaf = next(module.children(), None) is None and next(module.parameters(), None) is None
        if leaf and len(args) == 1 and not e.keywords:
            function = inspect.unwrap(type(module).forward)
            names = parameters(function)
            if len(names) == 2:
                return _follow(self.tree, function, {names[0]: Known(module, path), names[1]: args[0]}, self.depth + 1)
        keywords = self._keywords(e)
        return (
            "callmod",
            path or type(module).__name__,
            *args,
            *((("kw", tuple(sorted(keywords.items()))),) if keywords else ()),
        )

    def _inline(self, function: Any, e: ast.Call, me: Known | None) -> Any:
        if not isinstance(function, types.FunctionType):
            return operation(name_of(function), list(map(self.node, e.args)), self._keywords(e))
        signature = inspect.signature(function, follow_wrapped=False)
        given = [*([me] if me is not None else []), *map(self.value, e.args)]
        try:
            bound = signature.bind(*given, **{k.arg: self.value(k.value) for k in e.keywords if k.arg}).arguments
        except TypeError as error:
            raise Unreadable(f"the call of {function.__name__} does not fit its signature: {error}") from error
        env: dict[str, Any] = {n: Known(p.default) for n, p in signature.parameters.items() if p.default is not p.empty}
        for name, p in signature.parameters.items():
            if p.kind is p.VAR_KEYWORD:
                env[name] = ("tuple",)
                bound.pop(name, None)
            elif p.kind is p.VAR_POSITIONAL and name in bound:
                bound[name] = ("tuple", *map(as_node, bound[name]))
        return _follow(
            self.tree, function, env | {k: v for k, v in bound.items() if k not in env or v is not None}, self.depth + 1
        )

    def _builtin(self, f: Any, e: ast.Call) -> Any:
        args = list(map(self.value, e.args))
        if f in (getattr, hasattr):
            if not isinstance(args[0], Known) or not concrete(args[1]):
                return ("opaque", ast.unparse(e))
            there = hasattr(args[0].value, str(plain(args[1])))
            if f is hasattr:
                return ("const", there)
            return attribute(args[0], str(plain(args[1]))) if there or len(args) < 3 else args[2]
        if f is isinstance:
            return (
                ("const", isinstance(args[0].value, plain(args[1])))
                if isinstance(args[0], Known)
                else ("opaque", ast.unparse(e))
            )
        if all(map(concrete, args)) and not e.keywords:
            try:
                return ("const", f(*map(plain, args)))
            except (TypeError, ValueError):
                return ("opaque", ast.unparse(e))
        return (f.__name__, *map(as_node, args))
