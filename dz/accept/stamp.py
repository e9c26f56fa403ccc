"""What a result depends on, as one digest: when it changes, the check runs again."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import blake3
import msgspec

import dz
from dz.core import jsonio
from dz.core.check import Entry
from dz.shipped import folders

DISTRIBUTIONS = ("torch", "transformers", "tokenizers", "triton", "safetensors")


def digest(value: Any) -> str:
    """blake3 of plain data, whatever the order of its keys; 32 hex digits."""
    return blake3.blake3(msgspec.json.encode(jsonio.to_builtins(value), order="sorted")).hexdigest()[:32]


def code() -> str:
    """The digest of dz's own code and of the kernels: a changed line makes every result old."""
    h = blake3.blake3()
    roots = [Path(dz.__file__).resolve().parent, *folders("kernels")]
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            h.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return h.hexdigest()[:32]


def versions() -> dict[str, str]:
    """The versions of dz and of what it stands on."""
    out = {"dz": dz.__version__}
    for name in DISTRIBUTIONS:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = ""
    return out


def inputs_of(entry: Entry, base: str) -> str:
    """The digest for one line of a checklist; `base` is that of everything the lines share."""
    return digest([base, entry.check, entry.name, entry.params, entry.required])
