"""The tensors beside the tokens of a request, to bytes and back: server and engine process exchange them by value.

A tensor keeps its name. A list of tensors (pictures of different sizes, say) becomes one blob for each element, named
`name.0`, `name.1`, ...; lists in lists `name.0.0`. No processor output has a dot in its name."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from dz.core.messages import Blob
from dz.errors import Refused


def to_blob(tensor: torch.Tensor) -> Blob:
    """A tensor by value, from any device and layout."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Blob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes())


def from_blob(blob: Blob) -> torch.Tensor:
    """The tensor of a blob, on the CPU, with memory of its own. Raises Refused when size and shape disagree."""
    dtype = getattr(torch, blob.dtype, None)
    if not isinstance(dtype, torch.dtype) or prod(blob.shape) * dtype.itemsize != len(blob.data):
        raise Refused(
            f"a tensor of {blob.dtype} {list(blob.shape)} came with {len(blob.data)} bytes",
            "dtype, shape and bytes do not belong together",
            "report it; server and engine must be of one version",
            code="bad_blob",
        )
    if not blob.data:
        return torch.empty(blob.shape, dtype=dtype)
    return torch.frombuffer(bytearray(blob.data), dtype=dtype).reshape(blob.shape)


def pack(media: Mapping[str, Any]) -> dict[str, Blob]:
    """Processor outputs as blobs. Values are tensors, arrays, numbers, or lists of them; None is left out.

    Raises Refused for anything else, naming it: nothing that a model takes may be dropped on the way."""
    out: dict[str, Blob] = {}
    for name, value in media.items():
        _pack(name, value, out)
    return out


def unpack(blobs: Mapping[str, Blob]) -> dict[str, Any]:
    """The inverse of `pack`: tensors by name, lists of tensors where `name.N` were given."""
    tree: dict[str, Any] = {}
    for name, blob in blobs.items():
        *parents, last = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = from_blob(blob)
    return {k: _lists(v) for k, v in tree.items()}


def _lists(node: Any) -> Any:
    return [_lists(node[str(i)]) for i in range(len(node))] if isinstance(node, dict) else node


def _pack(name: str, value: Any, out: dict[str, Blob]) -> None:
    if value is None:
        return
    tensor = _tensor(value)
    if tensor is not None:
        out[name] = to_blob(tensor)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _pack(f"{name}.{i}", item, out)
    else:
        raise Refused(
            f"the processor's output '{name}' is a {type(value).__name__}",
            "only tensors, numbers and lists of them can be sent to the engine",
            "report it with the model's name",
            code="bad_media",
        )


def _tensor(value: Any) -> torch.Tensor | None:
    """`value` as one tensor where it is one: also arrays, numbers, and rectangular lists of numbers."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (bool, int, float)) or type(value).__module__ == "numpy":
        return torch.as_tensor(value)
    if isinstance(value, (list, tuple)) and value and _numbers(value):
        try:
            return torch.tensor(value)
        except (ValueError, TypeError):
            return None
    return None


def _numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_numbers(v) for v in value)
    return isinstance(value, (bool, int, float))
