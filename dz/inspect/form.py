"""The structure of a forward in a form that compares: syntax trees whose local names and attribute names are wiped.

Two spellings of one computation share most of their features; two classes that upstream copied share all of them."""

from __future__ import annotations

import ast
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_QUIET = ("logger", "warnings")  # calls on these compute nothing
_SKIPPED = (ast.Expr, ast.Pass, ast.Import, ast.ImportFrom, ast.Assert)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement: the digest of its wiped tree, where it stands, and its source in one line."""

    digest: int
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Form:
    """`features` are digests of all expressions and of their outlines; `statements` in source order; `digest` is the
    same for the same structure, whatever its names."""

    features: frozenset[int]
    statements: tuple[Statement, ...]

    @property
    def digest(self) -> int:
        """63 bits over all statements in order."""
        text = ",".join(str(s.digest) for s in self.statements).encode()
        return zlib.crc32(text) << 31 ^ zlib.adler32(text[::-1])


def form(functions: Iterable[ast.FunctionDef | ast.AsyncFunctionDef], *, texts: bool = True) -> Form:
    """The form of a forward and of the methods that it calls. `texts` off leaves out the statements' sources."""
    features: set[int] = set()
    statements: list[Statement] = []
    for function in functions:
        reader = _Reader(_locals(function), features)
        for s in _flat(function.body):
            digest = reader.node(_head(s))[0]
            statements.append(Statement(digest, s.lineno, _text(s) if texts else ""))
    return Form(frozenset(features), tuple(statements))


def called_methods(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    find: Callable[[str], ast.FunctionDef | ast.AsyncFunctionDef | None],
) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """A function and the methods that it calls on itself, at any depth, each once. `find` gives a method by name."""
    out, todo, seen = [], [function], {function.name}
    while todo:
        f = todo.pop(0)
        out.append(f)
        for n in ast.walk(f):
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and _is_self(n.func.value):
                method = find(n.func.attr) if n.func.attr not in seen else None
                if method is not None:
                    seen.add(n.func.attr)
                    todo.append(method)
    return out


def config_reads(tree: ast.AST) -> set[str]:
    """The configuration keys that code reads: `config.key`, `self.config.key`, `getattr(config, "key")`."""
    out = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and _is_config(n.value):
            out.add(n.attr)
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in ("getattr", "hasattr"):
            if len(n.args) >= 2 and _is_config(n.args[0]) and isinstance(n.args[1], ast.Constant):
                out.add(str(n.args[1].value))
        elif isinstance(n, ast.Subscript) and _is_config(n.value) and isinstance(n.slice, ast.Constant):
            out.add(str(n.slice.value))
    return out


def assigned(init: ast.AST) -> set[str]:
    """The attributes that a constructor gives its object."""
    out = set()
    for n in ast.walk(init):
        targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AnnAssign) else []
        out |= {t.attr for t in targets if isinstance(t, ast.Attribute) and _is_self(t.value)}
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr.startswith("register_"):
            out |= {str(a.value) for a in n.args[:1] if isinstance(a, ast.Constant)}
    return out


def _is_self(e: ast.expr) -> bool:
    return isinstance(e, ast.Name) and e.id == "self"


def _is_config(e: ast.expr) -> bool:
    name = e.id if isinstance(e, ast.Name) else e.attr if isinstance(e, ast.Attribute) else ""
    return name == "config" or name.endswith("_config")


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    a = function.args
    names = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x is not None}
    names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return frozenset(names - {"self"})


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in source order, those inside others after the head of the one that holds them."""
    for s in body:
        if isinstance(s, ast.Expr) and not _acts(s.value):
            continue
        if isinstance(s, _SKIPPED) and not isinstance(s, ast.Expr):
            continue
        yield s
        if isinstance(s, (*_FUNCTIONS, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "handlers", "finalbody"):
            for inner in getattr(s, field, None) or ():
                yield from _flat(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _acts(e: ast.expr) -> bool:
    """Whether an expression that stands alone does something: a docstring or a log line does not."""
    return isinstance(e, ast.Call) and not ast.unparse(e.func).startswith(_QUIET)


def _head(s: ast.stmt) -> ast.AST:
    """What a statement says itself, without the statements inside it."""
    if isinstance(s, (ast.If, ast.While)):
        return ast.Tuple(elts=[ast.Constant(type(s).__name__), s.test], ctx=ast.Load())
    if isinstance(s, (ast.For, ast.AsyncFor)):
        return ast.Tuple(elts=[ast.Constant("for"), s.target, s.iter], ctx=ast.Load())
    if isinstance(s, (ast.With, ast.AsyncWith)):
        return ast.Tuple(elts=[ast.Constant("with"), *(i.context_expr for i in s.items)], ctx=ast.Load())
    return ast.Constant("try") if isinstance(s, ast.Try) else s


def _text(s: ast.stmt) -> str:
    return " ".join(ast.unparse(s).split("\n", 1)[0].split())


class _Reader:
    """Digests of trees under one function's names. Each node gives (digest, label)."""

    def __init__(self, names: frozenset[str], features: set[int]) -> None:
        self.names, self.features = names, features

    def node(self, n: ast.AST) -> tuple[int, str]:
        label = self.label(n)
        if label is None:
            return 0, ""
        parts = [self.node(c) for c in self.children(n)]
        digest = zlib.crc32(f"{label}({','.join(str(d) for d, _ in parts)})".encode())
        if parts:
            self.features.add(digest)
            self.features.add(zlib.crc32(f"{label}<{','.join(name for _, name in parts)}>".encode()))
        return digest, label

    def label(self, n: ast.AST) -> str | None:
        if isinstance(n, ast.Name):
            return "v" if n.id in self.names else n.id
        if isinstance(n, ast.Attribute):
            return "self." if _is_self(n.value) else f".{n.attr}"
        if isinstance(n, ast.Constant):
            return "str" if isinstance(n.value, str) and len(n.value) > 12 else repr(n.value)
        if isinstance(n, ast.keyword):
            return f"{n.arg}="
        if isinstance(n, (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.AugAssign)):
            return type(n.op).__name__
        if isinstance(n, ast.Compare):
            return " ".join(type(o).__name__ for o in n.ops)
        return "Assign" if isinstance(n, ast.AnnAssign) else type(n).__name__

    def children(self, n: ast.AST) -> Iterator[ast.AST]:
        if isinstance(n, ast.Attribute):
            return iter(() if _is_self(n.value) else (n.value,))
        if isinstance(n, ast.AnnAssign):
            return iter((n.target, *(() if n.value is None else (n.value,))))
        skipped = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
        return (c for c in ast.iter_child_nodes(n) if not isinstance(c, skipped))
