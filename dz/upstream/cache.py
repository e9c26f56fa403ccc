"""Upstream's cache objects: new ones for a sequence, what they hold, and the facade over the engine's pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dz.core.protocols import KVStore

CACHE_NAMES = ("past_key_values", "cache", "cache_params", "past_key_value", "layer_past")


def new_cache(config: Any) -> Any:
    """An empty cache of upstream's own for one sequence, with the layer kinds that `config` asks for."""
    from transformers import DynamicCache

    return DynamicCache(config=config)


def tensors_in(cache: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a cache holds, wherever its layers keep them; each once."""
    seen: set[int] = set()
    stack: list[Any] = [cache]
    while stack:
        item = stack.pop()
        if (
            id(item) in seen
            or item is None
            or isinstance(item, (int, float, str, bool, type, torch.dtype, torch.device))
        ):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif hasattr(item, "__dict__") and not callable(item) and not hasattr(item, "to_dict"):
            stack.extend(vars(item).values())


def bytes_in(cache: Any) -> int:
    """Bytes of all tensors that a cache holds."""
    return sum(t.numel() * t.element_size() for t in tensors_in(cache))


def make_facade(store: KVStore, config: Any) -> Any:
    """A Cache whose `update` writes the step's new keys and values into `store` and returns what `store` gathers.

    It reports an empty past: positions and masks are the engine's business."""
    return _facade_class()(store, new_cache(config).layers)


def make_past(config: Any, length: int) -> Any:
    """A cache that claims to hold `length` tokens in every layer, none truncated: for asking upstream what it would
    pass to its layers at that point. Nothing can be stored in it."""
    return _past_class()(length, new_cache(config).layers)


def _facade_class() -> type:
    global _FACADE
    if _FACADE is None:
        from transformers import Cache

        class Facade(Cache):
            def __init__(self, store: KVStore, layers: list[Any]) -> None:
                self.layers, self.layer_class_to_replicate, self.offloading = layers, None, False
                self.store = store

            def update(
                self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return self.store.exchange(layer_idx, key_states, value_states)

            def get_seq_length(self, layer_idx: int = 0) -> int:
                return 0

            def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
                return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

            def get_query_offset(self, layer_idx: int = 0) -> int:
                return 0

        _FACADE = Facade
    return _FACADE


def _past_class() -> type:
    global _PAST
    if _PAST is None:
        from transformers import Cache

        class Past(Cache):
            def __init__(self, length: int, layers: list[Any]) -> None:
                self.layers, self.layer_class_to_replicate, self.offloading = layers, None, False
                self.length = length

            def get_seq_length(self, layer_idx: int = 0) -> int:
                return self.length

            def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
                n = query_length if isinstance(query_length, int) else query_length.shape[0]
                return self.length + n, 0

            def get_query_offset(self, layer_idx: int = 0) -> int:
                return self.length

        _PAST = Past
    return _PAST


_FACADE: type | None = None
_PAST: type | None = None
