"""The names that a Python module binds at its top level, read from its syntax tree."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

_LAZY = "_LazyModule"  # upstream's module class whose names are those that its TYPE_CHECKING branch imports
_ALIASES = "_MODULE_ALIASES"  # the end of upstream's tables of renamed modules


@dataclass(slots=True)
class Module:
    """A module's text and what it binds at its top level: `names` to where each comes from (module, name; empty for
    what is defined here), `stars` the modules it imports everything of. `open`: it may bind more at run time."""

    name: str
    package: bool
    tree: ast.Module
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    nodes: dict[str, ast.stmt] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    exported: list[str] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    open: bool = False


def read_module(name: str, package: bool, tree: ast.Module) -> Module:
    """What a module of this text binds."""
    out = Module(name, package, tree)
    lazy = any(isinstance(n, ast.Name) and n.id == _LAZY for n in ast.walk(tree))
    _Reader(out, lazy).read(tree.body)
    return out


@dataclass(slots=True)
class _Reader:
    out: Module
    lazy: bool

    def read(self, body: list[ast.stmt]) -> None:
        """Take in statements, whichever branch runs."""
        for node in body:
            self._statement(node)

    def _statement(self, node: ast.stmt) -> None:
        out = self.out
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out.names[node.name] = ("", "")
            out.nodes.setdefault(node.name, node)
            out.open |= node.name == "__getattr__"
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node)
        elif isinstance(node, ast.Import):
            for a in node.names:
                out.names[a.asname or a.name.partition(".")[0]] = ("", "")
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self._assign(node)
        elif isinstance(node, ast.Expr):
            out.open |= _fills_globals(node.value) and not self.lazy
        else:
            self._block(node)

    def _block(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not self.lazy:
            if not self.out.open:  # names for type checkers alone; with a __getattr__ they are what it serves
                self.read(node.orelse)
            return
        for part in ("body", "orelse", "finalbody"):
            self.read(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            self.read(handler.body)
        if isinstance(node, ast.For):
            self._target(node.target)
        if isinstance(node, ast.With):
            for item in node.items:
                if item.optional_vars is not None:
                    self._target(item.optional_vars)

    def _import_from(self, node: ast.ImportFrom) -> None:
        base = absolute(node, self.out.name, self.out.package)
        for a in node.names:
            if a.name == "*":
                self.out.stars.append(base)
            else:
                self.out.names[a.asname or a.name] = (base, a.name)

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for t in targets:
            self._target(t)
            if isinstance(t, ast.Name):
                self.out.nodes.setdefault(t.id, node)
            if isinstance(t, ast.Name) and t.id == "__all__":
                self._all(node)
            if isinstance(t, ast.Name) and t.id.endswith(_ALIASES) and isinstance(node.value, ast.Dict):
                self.out.aliases |= {str(k): str(v) for k, v in ast.literal_eval(node.value).items()}

    def _all(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        try:
            listed = [str(n) for n in ast.literal_eval(node.value)] if node.value else []
        except (ValueError, TypeError):
            self.out.open = True
            return
        self.out.exported = [*(self.out.exported or []), *listed]

    def _target(self, target: ast.expr) -> None:
        for n in ast.walk(target):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                self.out.names[n.id] = ("", "")
        if isinstance(target, ast.Subscript) and not self.lazy:
            self.out.open |= _fills_globals(target.value) or "sys.modules" in ast.unparse(target)


def binds(node: ast.stmt) -> set[str]:
    """The names that a statement of a class body defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _fills_globals(node: ast.expr) -> bool:
    """Whether an expression at the top level may bind names: globals().update(...), exec(...) and the like."""
    text = ast.unparse(node)
    return text.startswith(("globals()", "exec(", "setattr(sys.modules", "vars().", "locals()."))


def absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    """The absolute name of the module that a `from ... import` in `module` means."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + package]
    return ".".join([*kept, *([node.module] if node.module else [])])
