"""What a repository's Python files import and touch, read from their syntax trees: nothing of them runs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from dz.core.source import Source
from dz.hub.remote_code import Reference, code_files, references

Guard = Literal["", "try", "if", "typing"]
_CACHE = re.compile(r"cache|past", re.IGNORECASE)
_NO_CACHE = re.compile(r"position|cached|implementation|length", re.IGNORECASE)
_IMPORT_FAULTS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


@dataclass(frozen=True, slots=True)
class Import:
    """`from module import name`, or `import module` with an empty name. `guard` says what may skip it: a `try` that
    catches its failure, an `if`, or that it is for type checkers; `late` that it runs when a function is called."""

    file: str
    line: int
    module: str
    name: str
    guard: Guard
    late: bool

    @property
    def where(self) -> str:
        """file:line."""
        return f"{self.file}:{self.line}"

    @property
    def text(self) -> str:
        """The symbol with its module."""
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True, slots=True)
class Use:
    """An attribute of something that looks like a cache or a configuration: `receiver` is its source text."""

    file: str
    line: int
    receiver: str
    name: str
    how: Literal["read", "call", "write"]

    @property
    def where(self) -> str:
        """file:line."""
        return f"{self.file}:{self.line}"

    @property
    def of_cache(self) -> bool:
        """Whether the receiver's name says that it is a cache."""
        last = self.receiver.rpartition(".")[2]
        return bool(_CACHE.search(last)) and not _NO_CACHE.search(last)


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that Python cannot read."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Code:
    """The Python files of a repository. `trees` are those that parse; `reached` those that upstream's Auto classes
    would import by way of `entries`; nothing else of the repository runs. `missing` are (JSON file, code file) of
    entries whose file is not there; `windows` says that config.json limits what layers look at and names no kinds."""

    trees: dict[str, ast.Module]
    faults: tuple[Fault, ...]
    entries: tuple[Reference, ...]
    missing: tuple[tuple[str, str], ...]
    windows: bool = False

    @cached_property
    def reached(self) -> frozenset[str]:
        """The files that a load runs, and those that a chat model's own `generate` would."""
        todo = [r.path for r in self.entries if not r.repository]
        seen: set[str] = set()
        while todo:
            path = todo.pop()
            if path in seen:
                continue
            seen.add(path)
            todo += [p for p in self._siblings(path) if p not in seen]
        return frozenset(seen & {*self.trees, *(f.file for f in self.faults)})

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import of every file, relative ones left out."""
        return tuple(i for path, tree in self.trees.items() for i in _imports(path, tree))

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """Every attribute that is read, called or written on a named receiver."""
        return tuple(u for path, tree in self.trees.items() for u in _uses(path, tree))

    @cached_property
    def lost(self) -> tuple[Import, ...]:
        """Relative imports of files or names that the repository lacks."""
        return tuple(self._lost())

    def _siblings(self, path: str) -> Iterator[str]:
        """The files that a file imports relatively, as upstream copies them."""
        tree = self.trees.get(path)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.ImportFrom) and node.level:
                base = Path(path).parents[node.level - 1]
                names = [node.module] if node.module else [a.name for a in node.names]
                for name in names:
                    found = (base / name.replace(".", "/")).as_posix()
                    yield from (p for p in (f"{found}.py", f"{found}/__init__.py") if p in self.trees)
                    yield from (f.file for f in self.faults if f.file == f"{found}.py")

    def _lost(self) -> Iterator[Import]:
        known = {*self.trees, *(f.file for f in self.faults)}
        for path, tree in self.trees.items():
            for node, guard, late in _guarded(tree):
                if not isinstance(node, ast.ImportFrom) or not node.level or not node.module:
                    continue
                if node.level > len(Path(path).parents):
                    continue
                found = (Path(path).parents[node.level - 1] / node.module.replace(".", "/")).as_posix()
                if f"{found}.py" not in known and f"{found}/__init__.py" not in known:
                    yield Import(path, node.lineno, "." * node.level + node.module, "", guard, late)


def read_code(source: Source) -> Code:
    """The code of a source, parsed. A file that is no Python is a fault."""
    trees: dict[str, ast.Module] = {}
    faults: list[Fault] = []
    for path in code_files(source):
        try:
            trees[path] = ast.parse((source.path / path).read_bytes(), filename=path)
        except SyntaxError as e:
            faults.append(Fault(path, e.lineno or 1, e.msg))
        except ValueError as e:  # a null byte
            faults.append(Fault(path, 1, str(e)))
    entries = references(source.path)
    lost = [(r.file, r.path) for r in entries if not r.repository and r.path not in {*trees, *(f.file for f in faults)}]
    return Code(trees, tuple(faults), entries, tuple(dict.fromkeys(lost)), _windows(source))


def _windows(source: Source) -> bool:
    try:
        data = json.loads((source.path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # who needs the configuration says what is wrong with it
    levels = [data, *(v for v in data.values() if isinstance(v, dict))] if isinstance(data, dict) else []
    limits = ("sliding_window", "attention_chunk_size")
    return any(d.get(n) is not None for d in levels for n in limits) and not any("layer_types" in d for d in levels)


def _imports(path: str, tree: ast.Module) -> Iterator[Import]:
    for node, guard, late in _guarded(tree):
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, a.name, "", guard, late) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for a in node.names:
                yield Import(path, a.lineno, node.module, "" if a.name == "*" else a.name, guard, late)


def _guarded(tree: ast.Module) -> Iterator[tuple[ast.stmt, Guard, bool]]:
    """Every import statement with what may skip it and whether it runs late."""
    todo: list[tuple[Iterable[ast.AST], Guard, bool]] = [(tree.body, "", False)]
    while todo:
        nodes, guard, late = todo.pop()
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node, guard, late
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                todo.append((node.body, guard, True))
            elif isinstance(node, ast.Try):
                caught: Guard = guard or ("try" if _catches(node) else "")
                todo.append((node.body, caught, late))
                todo.append(([*node.orelse, *node.finalbody], guard, late))
                todo.append(([s for h in node.handlers for s in h.body], guard or "if", late))
            elif isinstance(node, ast.If):
                kind: Guard = "typing" if "TYPE_CHECKING" in ast.unparse(node.test) else "if"
                todo.append((node.body, guard or kind, late))
                todo.append((node.orelse, guard or "if", late))
            elif isinstance(node, ast.stmt):
                todo.append((ast.iter_child_nodes(node), guard, late))


def _catches(node: ast.Try) -> bool:
    for handler in node.handlers:
        if handler.type is None:
            return True
        names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
        if names & _IMPORT_FAULTS:
            return True
    return False


def _uses(path: str, tree: ast.Module) -> Iterator[Use]:
    calls = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    written = {id(t.value) for t in ast.walk(tree) if isinstance(t, ast.Subscript) and isinstance(t.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name | ast.Attribute):
            how = "read" if isinstance(node.ctx, ast.Load) else "write"
            yield Use(path, node.lineno, ast.unparse(node.value), "__getitem__", how)
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name | ast.Attribute):
            continue
        stored = not isinstance(node.ctx, ast.Load) or id(node) in written
        how = "write" if stored else "call" if id(node) in calls else "read"
        yield Use(path, node.lineno, ast.unparse(node.value), node.attr, how)
