"""The safetensors header, by the standard library alone: names, dtypes, shapes, offsets, expected file size."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dz.core.source import Source
from dz.errors import Refused

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
MAX_HEADER = 1 << 30  # bytes; far above any published file, far below what a corrupt length field claims
LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
AGAIN = "`dz fetch MODEL` fetches that file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: dtype as safetensors names it, shape, and byte range relative to the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """Stored elements (packed formats store several values in one)."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `expected_size` = 8 + header length + largest offset."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    header_bytes: int

    @property
    def data_start(self) -> int:
        """Offset of the data section in the file."""
        return 8 + self.header_bytes

    @property
    def expected_size(self) -> int:
        """The size the file must have, in bytes."""
        return self.data_start + max((t.end for t in self.tensors.values()), default=0)


def lfs_stub(path: Path) -> int | None:
    """The size that a git-LFS pointer declares if `path` is one, else None."""
    try:
        with path.open("rb") as f:
            head = f.read(512)
    except IsADirectoryError:
        return None
    if not head.startswith(LFS_MAGIC):
        return None
    for line in head.decode("utf-8", "replace").splitlines():
        if line.startswith("size ") and line[5:].strip().isdigit():
            return int(line[5:])
    return 0


def header_length(first8: bytes, name: str) -> int:
    """The header's length from a file's first 8 bytes. Raises Refused when it cannot be one."""
    if len(first8) < 8:
        raise Refused(
            f"{name} is cut short",
            f"it holds {len(first8)} bytes, a header alone needs 8",
            AGAIN,
            code="truncated",
        )
    (n,) = struct.unpack("<Q", first8)
    if n > MAX_HEADER or n < 2:
        raise Refused(
            f"{name} is not a safetensors file",
            f"its first 8 bytes give a header of {n} bytes",
            AGAIN,
            code="not_safetensors",
        )
    return n


def unique(bad: Callable[[str], Refused]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """The `object_pairs_hook` that raises `bad(why)` for an object that names a key twice."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            names = [key for key, _ in pairs]
            raise bad(f"it names {next(n for i, n in enumerate(names) if n in names[:i])!r} twice")
        return out

    return hook


def parse_header(raw: bytes, name: str) -> Header:
    """A Header from the JSON bytes (without the length). Raises Refused naming the file and the tensor at fault."""

    def bad(why: str) -> Refused:
        return Refused(f"{name} has a broken header", why, AGAIN, code="bad_header")

    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=unique(bad))
    except (ValueError, RecursionError) as e:  # bad UTF-8, bad JSON, and numbers too long to convert
        raise bad(f"it is not JSON: {e}") from e
    if not isinstance(data, dict):
        raise bad("it is not a JSON object")
    metadata = data.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise bad("its __metadata__ is not an object")
    tensors: dict[str, TensorInfo] = {}
    for key, value in data.items():
        try:
            dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise bad(f"the entry of {key!r} lacks dtype, shape or data_offsets") from None
        if any(type(i) is not int or i < 0 for i in (*shape, begin, end)):  # a bool is no number here
            raise bad(f"the entry of {key!r} has a shape or an offset that is not a whole number")
        if not isinstance(dtype, str) or dtype not in BITS:
            raise bad(f"{key!r} has the unknown dtype {dtype!r}")
        if (prod(shape) * BITS[dtype] + 7) // 8 != end - begin:
            raise bad(f"{key!r} is {dtype} {list(shape)} but spans {end - begin} bytes")
        tensors[key] = TensorInfo(key, dtype, shape, begin, end)
    end = 0
    for t in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if t.begin != end:
            raise bad(f"{t.name!r} starts at {t.begin}, the tensor before it ends at {end}")
        end = t.end
    return Header(tensors, dict(metadata), len(raw))


def read_header(path: Path) -> Header:
    """The header of a local file, checked against the file's size. Raises Refused (LFS stub, truncated, broken)."""
    stub = lfs_stub(path)
    if stub is not None:
        raise Refused(
            f"{path} is a git-LFS pointer, not the file",
            f"it stands for {stub:,} bytes that were never pulled",
            "run `git lfs pull` there, or `dz fetch MODEL`, which fetches it again",
            code="lfs_stub",
        )
    return _checked(path, path.stat().st_size, str(path))


def read_kept(path: Path, size: int, name: str) -> Header:
    """The header of a weight file that is not here: `path` keeps its first bytes, the header's length and the header,
    and `size` is the length that the hub lists for the whole file `name`.

    Raises Refused where the header is cut or broken, or needs a file of another length."""
    return _checked(path, size, name)


def _checked(path: Path, size: int, name: str) -> Header:
    with path.open("rb") as f:
        n = header_length(f.read(8), name)
        raw = f.read(n) if 8 + n <= size else b""
    if len(raw) < n:
        raise Refused(
            f"{name} is cut inside its header",
            f"the header needs {8 + n:,} bytes, the file has {min(size, 8 + len(raw)) if raw else size:,}",
            AGAIN,
            code="truncated",
        )
    header = parse_header(raw, name)
    if header.expected_size != size:
        word = "short" if size < header.expected_size else "long"
        raise Refused(
            f"{name} is {abs(header.expected_size - size):,} bytes too {word}",
            f"its header needs {header.expected_size:,} bytes, the file has {size:,}",
            AGAIN,
            code="truncated" if word == "short" else "wrong_size",
        )
    return header


def source_header(source: Source, path: str) -> Header:
    """The header of a source's weight file, from the file itself or from what `dz fetch --metadata` kept of it.

    Raises FileNotFoundError where neither is there, Refused as `read_header` does."""
    size = next((f.size for f in source.files if f.path == path), None)
    if size is None or not source.at(path).is_file():
        raise FileNotFoundError(path)
    return read_kept(source.at(path), size, path) if source.headers else read_header(source.at(path))
