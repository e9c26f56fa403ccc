"""Forms of classes and functions: from a source file by name, and of live objects by what Python runs."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dz.inspect.form import Form, called_methods, form

Function = ast.FunctionDef | ast.AsyncFunctionDef
_WHOLE = ("PreTrainedModel", "GenerationMixin")  # classes of these are models, not parts of one


@dataclass(frozen=True, slots=True)
class Piece:
    """A class with a forward, or a function: its syntax trees. `init` are its constructors, its own first; `line` is
    that of the class in its file, or of the forward of a live object."""

    name: str
    line: int
    functions: tuple[Function, ...]
    init: tuple[Function, ...] = ()

    def form(self, *, texts: bool = True) -> Form:
        """Its form; see `dz.inspect.form`."""
        return form(self.functions, texts=texts)


class File:
    """The pieces of one source text: every class with a forward that is part of a model, every top-level function."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        self.classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
        self.functions = {n.name: n for n in tree.body if isinstance(n, Function)}

    def pieces(self) -> Iterator[Piece]:
        """All of them, in no promised order."""
        for name in (*self.classes, *self.functions):
            found = self.piece(name)
            if found is not None:
                yield found

    def piece(self, name: str) -> Piece | None:
        """The piece of this name; None for what has no forward, and for whole models."""
        function = self.functions.get(name)
        if function is not None:
            return Piece(name, function.lineno, (function,))
        cls = self.classes.get(name)
        forward = None if cls is None else self.method(cls, "forward")
        if cls is None or forward is None or self._whole(cls):
            return None
        functions = called_methods(forward, lambda method: self.method(cls, method))
        init = tuple(m for c in self._line(cls) for m in c.body if isinstance(m, Function) and m.name == "__init__")
        return Piece(name, cls.lineno, tuple(functions), init)

    def method(self, cls: ast.ClassDef, name: str) -> Function | None:
        """A method of a class or of its bases in this file."""
        return next((m for c in self._line(cls) for m in c.body if isinstance(m, Function) and m.name == name), None)

    def _line(self, cls: ast.ClassDef) -> list[ast.ClassDef]:
        """A class and its bases in this file, nearest first."""
        out, todo = [], [cls]
        while todo:
            c = todo.pop(0)
            if c not in out:
                out.append(c)
                todo += [self.classes[b] for b in _bases(c) if b in self.classes]
        return out

    def _whole(self, cls: ast.ClassDef) -> bool:
        return any(b.endswith(_WHOLE) for c in self._line(cls) for b in _bases(c))


def live(target: Any) -> Piece | None:
    """The piece that a live module or function is; None when its source is not there. Lines are the file's."""
    if inspect.isfunction(target):
        found = tree_of(target)
        return None if found is None else Piece(target.__name__, found.lineno, (found,))
    cls = type(target)
    forward = tree_of(getattr(cls, "forward", None))
    if forward is None:
        return None

    def method(name: str) -> Function | None:
        held = inspect.getattr_static(cls, name, None)
        ours = inspect.isfunction(held) and not held.__module__.startswith("torch.")
        return tree_of(held) if ours else None

    inits = [c.__dict__["__init__"] for c in cls.__mro__ if "__init__" in c.__dict__ and _ours(c)]
    init = tuple(t for t in map(tree_of, inits) if t is not None)
    return Piece(cls.__name__, forward.lineno, tuple(called_methods(forward, method)), init)


def tree_of(function: Any) -> Function | None:
    """The syntax tree of a function with the line numbers of its file; None when its source is not there."""
    try:
        lines, start = inspect.getsourcelines(inspect.unwrap(function))
        node = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError):
        return None
    if not isinstance(node, Function):
        return None
    ast.increment_lineno(node, start - 1)
    return node


def module_text(name: str) -> str:
    """The source text of an imported module; empty when it is not there."""
    module = sys.modules.get(name)
    try:
        return inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        return ""


def _ours(cls: type) -> bool:
    return not cls.__module__.startswith(("torch.", "builtins"))


def _bases(cls: ast.ClassDef) -> list[str]:
    return [b.id if isinstance(b, ast.Name) else b.attr for b in cls.bases if isinstance(b, (ast.Name, ast.Attribute))]
