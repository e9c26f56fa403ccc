"""What pins a folder: its files, the digest of its code, and the digest that names a local folder's revision."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from blake3 import blake3

from dz.core.headers import MAX_HEADER
from dz.core.index import choose, is_weight
from dz.core.source import Source
from dz.errors import Refused

# Files whose content decides what a model does: configuration, code, templates, tokenizers.
_CONTENT = (".json", ".py", ".jinja", ".txt", ".model", ".tiktoken", ".yaml", ".yml", ".vocab", ".merges")
_CHUNK = 1 << 20  # bytes read at a time
PENDING = ".incomplete"  # the hub client's temporary files
NOTES = Path(".cache") / "huggingface" / "download"  # where the client notes commit and etag of each file of a folder


def listing(folder: Path, *, skip: Path | None = None) -> tuple[str, ...]:
    """Relative paths of all files of a folder, sorted; hidden ones, `__pycache__` and the tree `skip` are left out."""
    out: list[str] = []
    for root, folders, files in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(f for f in folders if not _hidden(f) and here / f != skip)
        out += [(here / f).relative_to(folder).as_posix() for f in files if not _hidden(f)]
    return tuple(sorted(out))


def decides(path: str) -> bool:
    """Whether a file's content decides what a model does: configuration, code, templates, tokenizer, an index."""
    return path.endswith(_CONTENT)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__" or name.endswith(PENDING)


def code_hash(folder: Path, paths: Iterable[str]) -> str:
    """blake3 over the Python files among `paths`: each path and content, sorted by path; empty if there are none."""
    files = sorted(p for p in paths if p.endswith(".py"))
    if not files:
        return ""
    h = blake3()
    for path in files:
        _add(h, path, (folder / path).read_bytes())
    return h.hexdigest()


def code_digest(path: Path) -> str:
    """The sha256 of a Python file; empty for other files."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" and path.is_file() else ""


def local_revision(folder: Path, paths: Sequence[str]) -> str:
    """The first 8 digits of the blake3 of a folder's configuration, code, weight headers and weight sizes.

    Weight files that nothing reads do not count and are not opened. The data of the others is not read; that a file
    holds other numbers under the same header and size is found by the modification times that the lock keeps
    (`stamps`)."""
    h = blake3()
    ignored = _ignored(folder, paths)
    for path in sorted(paths):
        full = folder / path
        if not full.is_file() or path in ignored:
            continue
        if decides(path):
            _add(h, path, full.read_bytes())
        elif is_weight(path):
            head = _head(full) if path.endswith(".safetensors") else b""
            _add(h, path, struct.pack("<Q", full.stat().st_size) + head)
    return h.hexdigest()[:8]


def _ignored(folder: Path, paths: Sequence[str]) -> Collection[str]:
    try:
        return choose(paths, lambda path: (folder / path).read_bytes()).ignored
    except (Refused, OSError):  # the check of the folder says why; for the revision every file counts then
        return ()


def _add(h: blake3, path: str, content: bytes) -> None:
    name = path.encode()
    h.update(struct.pack("<QQ", len(name), len(content)) + name)
    h.update(content)


def _head(path: Path) -> bytes:
    """The header of a safetensors file with its length, or the first bytes of what only claims to be one."""
    with path.open("rb") as f:
        first = f.read(8)
        n = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        return first + f.read(n if n <= MAX_HEADER else _CHUNK)


def stamps(source: Source) -> dict[str, int]:
    """The modification time of each file of a source, in microseconds; a file that is not there has none."""
    out = {}
    for f in source.files:
        try:
            out[f.path] = source.at(f.path).stat().st_mtime_ns // 1000
        except FileNotFoundError:
            continue
    return out
