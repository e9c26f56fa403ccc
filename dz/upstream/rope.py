"""Rope that follows the longest position of a call: from where it does, and how a call is kept free of earlier ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dz.upstream.cache import CACHE_NAMES, make_past

FOLLOWING = ("dynamic", "longrope")  # upstream's names of the types that rescale while they run


@dataclass(frozen=True, slots=True)
class Following:
    """A rope under which tokens beyond position `length` change the rotation of those computed with them. Upstream
    computes a longer prompt in one piece and what follows token by token; with `restarts` it throws its cache away when
    a sequence grows beyond `length`, and computes all of it anew in one piece."""

    length: int
    restarts: bool


def following(model: Any) -> Following | None:
    """What upstream's model asks for; None for ropes by which a token's rotation depends on its own position alone."""
    length = follows_from(model.config.get_text_config(decoder=True))
    return Following(length, _restarts(model, length)) if length is not None else None


def _restarts(model: Any, length: int) -> bool:
    """Asked of upstream: does it keep a cache of `length` tokens when it prepares the next one?"""
    prepare = model.prepare_inputs_for_generation
    known = [*inspect.signature(prepare).parameters, *inspect.signature(model.forward).parameters]
    name = next(n for n in CACHE_NAMES if n in known)
    ids = torch.zeros(1, length + 1, dtype=torch.long)
    past = make_past(model.config.get_text_config(decoder=True), length)
    got = prepare(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **{name: past})
    return got.get(name) is None


def follows_from(config: Any) -> int | None:
    """The `length` of Following, from the configuration alone."""
    ropes = getattr(config, "rope_parameters", None) or {}
    tables = [ropes, *(v for v in ropes.values() if isinstance(v, dict))]
    stated = int(config.max_position_embeddings) if any(_follows(t) for t in tables) else 0
    lengths = [int(t.get("original_max_position_embeddings") or stated) for t in tables if _follows(t)]
    return min([*lengths, stated]) if lengths else None


def _follows(table: dict[str, Any]) -> bool:
    kind = table.get("rope_type")
    return isinstance(kind, str) and any(f in kind for f in FOLLOWING)


class Snapshot:
    """Buffers and plain attributes (tensors and numbers) of modules, to be put back: what a forward may leave behind.

    `values` False keeps the buffers' identity only: enough where they are replaced and never written."""

    def __init__(self, modules: Iterable[nn.Module], *, values: bool = True) -> None:
        self._held = [
            (
                module,
                {name: (b, b.clone() if values and b is not None else None) for name, b in module._buffers.items()},
                {k: v for k, v in vars(module).items() if _plain(v)},
            )
            for module in modules
        ]

    def restore(self) -> None:
        """Everything as it was; what was added is removed."""
        for module, buffers, plain in self._held:
            for name in module._buffers.keys() - buffers.keys():
                del module._buffers[name]
            for name, (buffer, value) in buffers.items():
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)
            for name in [k for k, v in vars(module).items() if k not in plain and _plain(v)]:
                del vars(module)[name]
            vars(module).update(plain)


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float, torch.Tensor))
