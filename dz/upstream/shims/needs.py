"""Which shims a repository needs, and what it needs that no shim gives: by reading its code and what is installed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dz.upstream.installed import Answer, Installed
from dz.upstream.remote_facts import Code, Import, Use
from dz.upstream.shims.shim import Attribute, Need, Shim, Symbol
from dz.upstream.shims.table import ANYWHERE, SHIMS

_UPSTREAM = "transformers"
_MIXIN = ("transformers.generation.utils", "GenerationMixin")
_BASE = ("transformers.modeling_utils", "PreTrainedModel")
_OLD_CACHES = {"past_key_values", "cache_params"}


@dataclass(frozen=True, slots=True)
class Lookup:
    """An import with the answer of the installed packages, and the shim that stands in for what they lack."""

    entry: Import
    answer: Answer
    shim: str = ""

    @property
    def blocks(self) -> bool:
        """Whether the module that holds it cannot be imported."""
        return self.answer.state == "missing" and not self.shim and not self.entry.guard and not self.entry.late


def lookups(code: Code, installed: Installed) -> tuple[Lookup, ...]:
    """Every import of the code, looked up."""
    asked: dict[tuple[str, str], Answer] = {}
    out = []
    for entry in code.imports:
        key = (entry.module, entry.name)
        if key not in asked:
            asked[key] = installed.symbol(*key) if entry.name else installed.module(entry.module)
        missing = asked[key].state == "missing" and _may_fail(entry)
        shim = _shim_of(entry) if missing else None
        out.append(Lookup(entry, asked[key], shim.name if shim else ""))
    return tuple(out)


def needed(code: Code, installed: Installed) -> tuple[Need, ...]:
    """The shims that the files which a load reaches need, each with its places."""
    found = lookups(code, installed)
    out = []
    for shim in SHIMS:
        places = [f"{k.entry.where}: {k.entry.text}" for k in found if k.shim == shim.name and _run(code, k.entry.file)]
        places += [p for s in shim.symbols if s.changed for p in _changed(code, s, installed)]
        places += [p for a in shim.attributes for p in _touched(code, a, installed)]
        places += [p for m in shim.mends for p in _SEES[m.sees](code, installed)]
        if places:
            out.append(Need(shim=shim, places=tuple(dict.fromkeys(places))))
    return tuple(out)


def touches(code: Code, attribute: Attribute) -> Iterator[Use]:
    """Uses, in files that a load reaches, of an attribute on what looks like an object of its class."""
    of_config = attribute.cls.endswith("Config")
    for use in code.uses:
        fits = "config" in use.receiver.lower() if of_config else use.of_cache
        if use.name == attribute.name and fits and _run(code, use.file):
            yield use


def _run(code: Code, file: str) -> bool:
    return file in code.reached


def _may_fail(entry: Import) -> bool:
    """Whether nothing round it handles its failure. An `if` asks about a package as a rule, so that what upstream
    itself lacks is given under it and a missing package is not."""
    return entry.guard == "" or (entry.guard == "if" and entry.module.partition(".")[0] == _UPSTREAM)


def _shim_of(entry: Import) -> Shim | None:
    below = entry.module + "."
    for shim in SHIMS:
        for s in shim.symbols:
            if not entry.name and (s.module == entry.module or s.module.startswith(below)):
                return shim
            if (s.module, s.name) == (entry.module, entry.name) or s.module == f"{below}{entry.name}":
                return shim
            if s.module == _top(entry) != _UPSTREAM and entry.name in ("", s.name):
                return shim
    anywhere = ANYWHERE.get(entry.name)
    if anywhere is None or entry.module.partition(".")[0] != _UPSTREAM:
        return None
    return next(s for s in SHIMS if s.name == anywhere[0])


def symbols_for(need: Need, code: Code) -> list[Symbol]:
    """What the hook has to give for a need: the shim's symbols, and those found by name alone at their places."""
    out = list(need.shim.symbols)
    for entry in code.imports:
        make = ANYWHERE.get(entry.name)
        if make is not None and make[0] == need.shim.name and _top(entry) == _UPSTREAM:
            out.append(Symbol(module=entry.module, name=entry.name, make=make[1]))
        if _top(entry) not in (_UPSTREAM, entry.module):
            same = [s for s in need.shim.symbols if s.module == _top(entry) and entry.name in ("", s.name)]
            out += [Symbol(module=entry.module, name=s.name, make=s.make) for s in same]
    return out


def _top(entry: Import) -> str:
    return entry.module.partition(".")[0]


def _changed(code: Code, symbol: Symbol, installed: Installed) -> Iterator[str]:
    found = installed.definition(symbol.module, symbol.name)
    if found is None or symbol.changed in _words(found[1]):
        return
    for entry in code.imports:
        if (entry.module, entry.name) != (symbol.module, symbol.name) or not _run(code, entry.file):
            continue
        tree = code.trees[entry.file]
        if symbol.unless and any(isinstance(n, ast.FunctionDef) and n.name == symbol.unless for n in ast.walk(tree)):
            continue
        if not symbol.mentions or _words(tree) & {*symbol.mentions}:
            yield f"{entry.where}: {symbol.name} of today takes no {symbol.changed!r}"


def _words(node: ast.AST) -> set[str]:
    """Strings, argument names and keywords in a syntax tree."""
    out: set[str] = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Constant) and isinstance(n.value, str):
            out.add(n.value)
        elif isinstance(n, ast.arg | ast.keyword) and n.arg:
            out.add(n.arg)
    return out


def _touched(code: Code, attribute: Attribute, installed: Installed) -> Iterator[str]:
    module, _, cls = attribute.cls.partition(":")
    if not attribute.always and installed.member(module, cls, attribute.name) is not None:
        return
    for use in touches(code, attribute):
        shown = f"{use.receiver}[...]" if use.name == "__getitem__" else f"{use.receiver}.{use.name}"
        yield f"{use.where}: {shown}"


def _classes(code: Code) -> Iterator[tuple[str, ast.ClassDef]]:
    for path in sorted(code.reached & code.trees.keys()):
        yield from ((path, n) for n in ast.walk(code.trees[path]) if isinstance(n, ast.ClassDef))


def _method(cls: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _listed_ties(code: Code, installed: Installed) -> Iterator[str]:
    for path, cls in _classes(code):
        for node in cls.body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.List | ast.Tuple):
                continue
            if any(ast.unparse(t) == "_tied_weights_keys" for t in node.targets):
                yield f"{path}:{node.lineno}: {cls.name}._tied_weights_keys"


def _ungenerating(code: Code, installed: Installed) -> Iterator[str]:
    if installed.member(*_BASE, "generate") is not None:
        return
    for path, cls in _classes(code):
        own = _method(cls, "prepare_inputs_for_generation")
        if own is not None and not any("Generation" in ast.unparse(b) for b in cls.bases):
            yield f"{path}:{cls.lineno}: {cls.name} has no generate of its own"


def _old_cache_arguments(code: Code, installed: Installed) -> Iterator[str]:
    prepare = installed.member(*_MIXIN, "prepare_inputs_for_generation")
    if not isinstance(prepare, ast.FunctionDef):
        return
    told = {a.arg for a in prepare.args.args}
    if not told & {"cache", "next_sequence_length"}:
        return  # as in 4.x
    for path, cls in _classes(code):
        if "lm_head" not in ast.unparse(cls) and _method(cls, "prepare_inputs_for_generation") is None:
            continue
        renamed = ("forward",) if "cache" in told else ()
        for name in (*renamed, "prepare_inputs_for_generation"):
            own = _method(cls, name)
            names = {a.arg for a in [*own.args.args, *own.args.kwonlyargs]} if own is not None else set()
            if own is not None and names & _OLD_CACHES and "cache" not in names:
                yield f"{path}:{own.lineno}: {cls.name}.{name}({(names & _OLD_CACHES).pop()}=...)"


def _computing(code: Code, installed: Installed) -> Iterator[str]:
    """Classes that register a buffer which is not saved, without the initialisation by which upstream refills it."""
    for path, cls in _classes(code):
        for node in ast.walk(cls):
            if isinstance(node, ast.Call) and _unsaved(node) and not _refills(code, cls):
                yield f"{path}:{node.lineno}: {cls.name} computes a buffer that is not saved"


def _unsaved(node: ast.Call) -> bool:
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
    return ast.unparse(node.func).endswith("register_buffer") and keywords.get("persistent") == "False"


def _refills(code: Code, cls: ast.ClassDef) -> bool:
    if _method(cls, "compute_default_rope_parameters") is not None:
        return True
    inits = [m for _, c in _classes(code) if (m := _method(c, "_init_weights")) is not None]
    return any(cls.name in ast.unparse(m) for m in inits)


def _windows_in_masks(code: Code, installed: Installed) -> Iterator[str]:
    """Where keys go into a cache, in code that knows no kinds of layers although the configuration has a window."""
    reached = [code.trees[p] for p in code.reached & code.trees.keys()]
    kinds = any("layer_types" in _words(t) or _attributes(t) & {"layer_types"} for t in reached)
    if not code.windows or kinds:
        return
    for use in code.uses:
        if use.name == "update" and use.how == "call" and use.of_cache and _run(code, use.file):
            yield f"{use.where}: {use.receiver}.update"


def _attributes(tree: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}


def _nothing(code: Code, installed: Installed) -> Iterator[str]:
    """Part of a shim whose need is seen by another part."""
    return iter(())


_SEES: dict[str, Callable[[Code, Installed], Iterator[str]]] = {
    "computing": _computing,
    "nothing": _nothing,
    "windows_in_masks": _windows_in_masks,
    "listed_ties": _listed_ties,
    "ungenerating": _ungenerating,
    "old_cache_arguments": _old_cache_arguments,
}
