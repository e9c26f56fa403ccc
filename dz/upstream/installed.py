"""What the installed packages define, read from their source: nothing is imported, so nothing runs."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Literal

from dz.upstream.bindings import Module, binds, read_module

State = Literal["there", "missing", "unchecked"]
_DEPTH = 12  # star imports followed


@dataclass(frozen=True, slots=True)
class Answer:
    """`state` of a module or symbol; `why` says what is missing, or why it could not be looked up by reading."""

    state: State
    why: str = ""


class Installed:
    """Looks modules and symbols up in the sources of what is installed. One object keeps what it has parsed."""

    def __init__(self, path: list[str] | None = None) -> None:
        self._path = path
        self._modules: dict[str, Module | None] = {}
        self._tops: dict[str, list[Path] | None] = {}

    def module(self, name: str) -> Answer:
        """Whether `import name` finds something."""
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names:
            return Answer("there")
        if self._locations(top) is None:
            return Answer("missing", f"no package {top} is installed")
        if self._file(name) is not None or self._alias(name):
            return Answer("there")
        return Answer("missing", f"{self._deepest(name)} has no module {name.rpartition('.')[2]}")

    def symbol(self, module: str, name: str) -> Answer:
        """Whether `from module import name` works."""
        found = self.module(module)
        if found.state != "there":
            return found
        if module.partition(".")[0] in sys.stdlib_module_names:
            return _standard(module, name)
        if self.module(f"{module}.{name}").state == "there":
            return Answer("there")
        return self._within(self._alias(module) or module, name, 0)

    def definition(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """(the module that defines it, its statement) of a function or class, through re-exports; None if unknown."""
        for _ in range(_DEPTH):
            parsed = self._parsed(self._alias(module) or module)
            if parsed is None:
                return None
            if name in parsed.nodes:
                return parsed.name, parsed.nodes[name]
            origin = parsed.names.get(name) or self._starred(parsed, name)
            if origin is None or not origin[0]:
                return None
            module, name = origin
        return None

    def mentions(self, module: str, text: str) -> bool:
        """Whether a string literal of an installed module is this text."""
        parsed = self._parsed(module)
        nodes = ast.walk(parsed.tree) if parsed is not None else ()
        return any(isinstance(n, ast.Constant) and n.value == text for n in nodes)

    def member(self, module: str, cls: str, name: str) -> ast.stmt | None:
        """The statement by which an installed class or one of its bases defines a name; None if none does."""
        todo, seen = [(module, cls)], set()
        while todo:
            at = todo.pop(0)
            found = self.definition(*at) if at not in seen else None
            seen.add(at)
            if found is None or not isinstance(found[1], ast.ClassDef):
                continue
            for node in found[1].body:
                if name in binds(node):
                    return node
            todo += [(found[0], ast.unparse(b).rpartition(".")[2]) for b in found[1].bases]
        return None

    def _starred(self, parsed: Module, name: str) -> tuple[str, str] | None:
        for star in parsed.stars:
            if self._within(star, name, 1).state == "there":
                return star, name
        return None

    def _within(self, module: str, name: str, depth: int) -> Answer:
        parsed = self._parsed(module)
        if parsed is None:
            return Answer("unchecked", f"{module} has no source to read")
        if name in parsed.names:
            return Answer("there")
        unsure = parsed.open
        for star in parsed.stars if depth < _DEPTH else ():
            if not self._may_hold(star, name) or not self._exports(star, name):
                continue
            inner = self._within(star, name, depth + 1)
            if inner.state == "there":
                return inner
            unsure |= inner.state == "unchecked"
        if unsure:
            return Answer("unchecked", f"{module} makes names at run time")
        return Answer("missing", f"{module} has no {name}")

    def _may_hold(self, module: str, name: str) -> bool:
        """Whether the text of a module mentions the name or stars at all: most need not be parsed."""
        path = self._file(module)
        if path is None or path.suffix != ".py" or module in self._modules:
            return True
        text = path.read_bytes()
        return name.encode() in text or b"import *" in text or b"globals()" in text or b"__getattr__" in text

    def _exports(self, module: str, name: str) -> bool:
        parsed = self._parsed(module)
        return parsed is None or parsed.exported is None or name in parsed.exported

    def _locations(self, top: str) -> list[Path] | None:
        """The folders of a top-level package, or the file of a module; None when it is not installed."""
        if top not in self._tops:
            self._tops[top] = self._find_top(top)
        return self._tops[top]

    def _find_top(self, top: str) -> list[Path] | None:
        try:
            spec = PathFinder.find_spec(top, self._path)
            if spec is None and self._path is None and top not in sys.modules:
                spec = importlib.util.find_spec(top)  # editable installs have finders of their own
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        if spec.submodule_search_locations is not None:
            return [Path(p) for p in spec.submodule_search_locations]
        return [Path(spec.origin)] if spec.origin else []

    def _file(self, name: str) -> Path | None:
        """The source or extension file of a module; a folder without `__init__.py` is given as itself."""
        top, *rest = name.split(".")
        places = self._locations(top)
        if places is None:
            return None
        for place in places:
            if place.is_file():
                if not rest:
                    return place
                continue
            base = place.joinpath(*rest)
            found = next((p for p in _candidates(base) if p.exists()), None)
            if found is not None:
                return found
        return None

    def _deepest(self, name: str) -> str:
        parts = name.split(".")
        return next(
            (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1) if self._file(".".join(parts[:n]))), parts[0]
        )

    def _alias(self, name: str) -> str:
        """The module that upstream serves under a name it has given up, or ""."""
        if self._file(name) is not None:
            return ""
        package, _, last = name.rpartition(".")
        parsed = self._parsed(name.partition(".")[0])
        if parsed is None or not package:
            return ""
        other = parsed.aliases.get(last, "") if package == parsed.name else ""
        if not other and parsed.aliases and last.startswith("image_processing_") and last.endswith("_fast"):
            other = last.removesuffix("_fast")
        return f"{package}.{other}" if other and self._file(f"{package}.{other}") else ""

    def _parsed(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> Module | None:
        path = self._file(name)
        if path is None:
            return None
        if path.is_dir():  # a namespace package binds nothing
            return Module(name, True, ast.Module([], []))
        if path.suffix != ".py":
            return None
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return None
        return read_module(name, path.name == "__init__.py", tree)


@cache
def here() -> Installed:
    """What this process can import, read once."""
    return Installed()


def _candidates(base: Path) -> Iterator[Path]:
    yield base / "__init__.py"
    yield base.with_name(base.name + ".py")
    for suffix in EXTENSION_SUFFIXES:
        yield base.with_name(base.name + suffix)
    if base.is_dir():
        yield base


def _standard(module: str, name: str) -> Answer:
    """The standard library may be imported: it is no code of the repository, and much of it has no source."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return Answer("missing", f"Python has no module {module}")
    if module not in sys.modules:
        return Answer("unchecked", f"{module} is not loaded")
    known = hasattr(sys.modules[module], name)
    return Answer("there") if known else Answer("missing", f"{module} has no {name}")
