"""Calls in a repository's code that reach outside the model: network, processes, files, evaluated text, pickles, native
code, hidden strings. Read from the syntax trees with names followed through imports and assignments."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# What a dotted name reaches; the longest beginning that fits decides.
REACHES = {
    "network": (
        "requests", "urllib.request", "urllib3", "http.client", "httpx", "aiohttp", "socket", "ftplib", "smtplib",
        "telnetlib", "paramiko", "websocket", "websockets", "xmlrpc", "ssl", "asyncio.open_connection",
        "huggingface_hub.hf_hub_download", "huggingface_hub.snapshot_download", "huggingface_hub.HfApi",
        "huggingface_hub.upload_file", "torch.hub",
    ),
    "process": (
        "subprocess", "os.system", "os.popen", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.kill", "pty",
        "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "multiprocessing.Process", "pexpect",
    ),
    "file write": (
        "os.remove", "os.unlink", "os.rename", "os.replace", "os.rmdir", "os.removedirs", "os.mkdir", "os.makedirs",
        "os.chmod", "os.chown", "os.symlink", "os.link", "os.truncate", "shutil", "tempfile", "torch.save",
        "numpy.save", "numpy.savez", "safetensors.torch.save_file",
    ),
    "evaluation": (
        "eval", "exec", "compile", "__import__", "importlib.import_module", "importlib.__import__", "runpy", "code",
        "codeop", "types.FunctionType", "types.CodeType", "builtins.eval", "builtins.exec", "builtins.compile",
        "builtins.__import__",
    ),
    "pickle": (
        "pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib.load", "shelve", "marshal", "torch.load",
        "yaml.load", "yaml.unsafe_load", "pandas.read_pickle",
    ),
    "native code": ("ctypes", "cffi", "torch.utils.cpp_extension", "torch.ops.load_library", "_ctypes", "mmap"),
    "hidden string": (
        "base64", "binascii", "codecs.decode", "bytes.fromhex", "bytearray.fromhex", "zlib.decompress",
        "lzma.decompress", "bz2.decompress", "gzip.decompress",
    ),
    "environment": ("os.environ", "os.getenv", "os.environb", "keyring", "getpass"),
}  # fmt: skip
WRITING = {"write_text", "write_bytes", "unlink", "rmdir", "symlink_to", "touch", "rename", "chmod", "mkdir"}
_OPENS = {"open", "io.open", "builtins.open", "os.open", "codecs.open"}
_IMPORTS = {"network", "process", "native code", "pickle"}  # kinds for which the import alone is worth a line
_MODES = re.compile(r"[wax+]")
_ENCODED = re.compile(r"(?:[0-9a-fA-F]{2}){40,}|[A-Za-z0-9+/_-]{120,}={0,2}")
_BITS = 3.2  # bits of entropy for each letter, above which a long unbroken string is no text or table of names


@dataclass(frozen=True, slots=True)
class Call:
    """A place that reaches outside: what kind, and the source text of it."""

    file: str
    line: int
    kind: str
    text: str


def calls(file: str, tree: ast.Module) -> tuple[Call, ...]:
    """Every such place of a file, in order, each once."""
    names = _Names(tree)
    found = [Call(file, line, kind, text) for line, kind, text in _places(tree, names)]
    return tuple(sorted(dict.fromkeys(found), key=lambda c: (c.line, c.kind)))


def _places(tree: ast.Module, names: _Names) -> Iterator[tuple[int, str, str]]:
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imported(node)
        elif isinstance(node, ast.Call):
            yield from _called(node, names)
        elif isinstance(node, ast.Attribute) and id(node) not in called:
            kind = _kind(names.dotted(node))
            if kind == "environment":
                yield node.lineno, kind, _short(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            yield from _hidden(node)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.Import):
        dotted = [a.name for a in node.names]
    else:
        dotted = [f"{node.module}.{a.name}" for a in node.names] if node.module and not node.level else []
    for name in dotted:
        kind = _kind(name)
        if kind in _IMPORTS:
            yield node.lineno, kind, f"imports {name}"


def _called(node: ast.Call, names: _Names) -> Iterator[tuple[int, str, str]]:
    kind = _kind(names.dotted(node.func)) or _by_arguments(node, names)
    if kind is not None:
        yield node.lineno, kind, _short(node)


def _by_arguments(node: ast.Call, names: _Names) -> str | None:
    """The kind of a call whose name alone says nothing."""
    dotted = names.dotted(node.func)
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if dotted in _OPENS:
        return "file write" if _opens_to_write(node, 1) else None
    if method == "open":
        return "file write" if _opens_to_write(node, 0) else None
    if method in WRITING and not dotted.startswith("self."):
        return "file write"
    if dotted == "numpy.load":
        return "pickle" if any(k.arg == "allow_pickle" and _true(k.value) for k in node.keywords) else None
    by_text = isinstance(node.func, ast.Call | ast.Subscript) and "__builtins__" in ast.unparse(node.func)
    return "evaluation" if by_text or (dotted == "getattr" and _reaches_by_text(node, names)) else None


def _opens_to_write(node: ast.Call, at: int) -> bool:
    """Whether an open's mode writes; a mode that cannot be read off counts as one."""
    mode = next((k.value for k in node.keywords if k.arg == "mode"), node.args[at] if len(node.args) > at else None)
    if mode is None:
        return False
    return not isinstance(mode, ast.Constant) or bool(_MODES.search(str(mode.value)))


def _reaches_by_text(node: ast.Call, names: _Names) -> bool:
    """getattr on a module that reaches outside, or on the builtins: with any name."""
    if not node.args:
        return False
    base = names.dotted(node.args[0])
    roots = {"os", "builtins", "__builtins__", "sys", "subprocess", "importlib", "socket"}
    return base.partition(".")[0] in roots and base.partition(".")[0] in names.modules | {"__builtins__"}


def _hidden(node: ast.Constant) -> Iterator[tuple[int, str, str]]:
    text = node.value.decode("latin-1") if isinstance(node.value, bytes) else str(node.value)
    found = _ENCODED.search(text)
    if found and _entropy(found.group()) > _BITS:
        yield node.lineno, "hidden string", f"{len(found.group())} encoded letters: {found.group()[:24]}..."
    elif isinstance(node.value, bytes) and len(text) > 40 and not text.isprintable():
        yield node.lineno, "hidden string", f"{len(text)} raw bytes"


def _entropy(text: str) -> float:
    counts = Counter(text)
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())


def _kind(dotted: str) -> str | None:
    """The kind of the longest name of the table that the dotted name begins with."""
    best, kind = 0, None
    for name, entries in REACHES.items():
        for entry in entries:
            fits = dotted == entry or dotted.startswith(entry + ".") or (
                entry in ("os.exec", "os.spawn") and dotted.startswith(entry)
            )  # fmt: skip
            if fits and len(entry) > best:
                best, kind = len(entry), name
    return kind


def _true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and node.value is False)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else text[:87] + "..."


class _Names:
    """What local names stand for: imports, and assignments of a name to another."""

    def __init__(self, tree: ast.Module) -> None:
        self._meaning: dict[str, str] = {}
        self.modules: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for a in node.names:
                    top = a.name if a.asname else a.name.partition(".")[0]
                    self._meaning[a.asname or top] = top
                    self.modules.add(top.partition(".")[0])
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for a in node.names:
                    self._meaning[a.asname or a.name] = f"{node.module}.{a.name}"
                    self.modules.add(node.module.partition(".")[0])
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
                meant = self.dotted(node.value)
                for t in node.targets:
                    if isinstance(t, ast.Name) and _kind(meant) is not None:
                        self._meaning.setdefault(t.id, meant)

    def dotted(self, node: ast.AST) -> str:
        """The dotted name of an expression with its first part replaced by what it stands for; "" for others. A call
        in the middle (`__import__("os").system`) is followed where its argument can be read."""
        if isinstance(node, ast.Name):
            return self._meaning.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        if isinstance(node, ast.Call) and self.dotted(node.func) in ("__import__", "importlib.import_module"):
            first = node.args[0] if node.args else None
            return str(first.value) if isinstance(first, ast.Constant) else ""
        return ""
