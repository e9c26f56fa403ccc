"""What goes into and comes out of modules: shapes, found by running upstream's decoder on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dz.errors import DzError
from dz.upstream.build import Built
from dz.upstream.decoder import FAILURES, Decoder
from dz.upstream.footprint import on_meta, tolerant

TOKENS = 24  # one sequence of a length that no usual dimension has


def trace(built: Built, names: Iterable[str]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """(arguments, results) in words, as `hidden_states [1, 24, 64] float32`, for each named module that one pass of the
    decoder reaches. Modules that the pass does not reach are left out."""
    found: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    handles = []
    for name in names:
        module = built.model.get_submodule(name)
        handles.append(module.register_forward_hook(_recorder(name, found), with_kwargs=True))
    try:
        decoder = Decoder(built)
        with on_meta(built.model), tolerant(built.layers), torch.no_grad():
            ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
            positions = torch.arange(TOKENS, device="meta")[None]
            decoder(cache=decoder.new_cache(), positions=positions, ids=ids)
    except (*FAILURES, DzError):
        pass  # what was reached before it stopped is known; the rest is told from its source
    finally:
        for handle in handles:
            handle.remove()
    return found


def _recorder(name: str, found: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> Any:
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if name in found:
            return
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        inputs = tuple(f"{k} {words(v)}" for k, v in given.items() if v is not None)
        results = result if isinstance(result, tuple) else (result,)
        found[name] = (inputs, tuple(words(r) for r in results))

    return hook


def words(value: Any) -> str:
    """A tensor's shape and dtype, a tuple's parts, anything else by its type."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(words(v) for v in value)})"
    return str(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
