"""What the cache objects of transformers 4.x answered, computed from today's. Each function is seen by the code of one
repository alone (`scoped`); the cache objects themselves stay upstream's."""

from __future__ import annotations

from typing import Any

import torch


def max_length(cache: Any, layer_idx: int | None = None) -> int | None:
    """The most tokens that a cache can hold; None where it grows (today's answer to that is -1)."""
    if not getattr(cache, "layers", True):
        return None  # a growing cache before its first layer
    for name in ("get_max_cache_shape", "get_max_length"):
        ask = getattr(cache, name, None)
        if ask is not None:
            found = ask()
            return None if found is None or int(found) < 0 else int(found)
    return None


def usable_length(cache: Any, new_seq_length: int, layer_idx: int = 0) -> int:
    """The tokens that a layer holds and keeps when `new_seq_length` more come; only a bounded cache drops some."""
    held, most = int(cache.get_seq_length(layer_idx)), max_length(cache)
    if most is not None and held + new_seq_length > most:
        return most - new_seq_length
    return held


def seen_tokens(cache: Any) -> int:
    """The tokens that the first layer has taken in."""
    return int(cache.get_seq_length())


def _layer(cache: Any, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    layer = cache.layers[layer_idx]
    if getattr(layer, "keys", None) is None:
        empty = torch.empty(0)
        return empty, empty
    return layer.keys, layer.values


def pair(cache: Any, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) of a layer, [B, H, T, D] each; empty before its first update. Raises KeyError beyond the last."""
    if not -len(cache.layers) <= layer_idx < len(cache.layers):
        raise KeyError(f"the cache has {len(cache.layers)} layers, layer {layer_idx} was asked for")
    return _layer(cache, layer_idx)


def keys(cache: Any) -> tuple[torch.Tensor, ...]:
    """The keys of all layers. A tuple: what an old cache let one write here would be lost in today's."""
    return tuple(_layer(cache, i)[0] for i in range(len(cache.layers)))


def values(cache: Any) -> tuple[torch.Tensor, ...]:
    """The values of all layers, as `keys`."""
    return tuple(_layer(cache, i)[1] for i in range(len(cache.layers)))


def to_legacy(cache: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """((keys, values), ...) of all layers that hold something."""
    return tuple(_layer(cache, i) for i in range(len(cache.layers)) if cache.get_seq_length(i))


def from_legacy(cls: Any, past_key_values: Any | None = None) -> Any:
    """A growing cache that holds the pairs of an old-style tuple; the cache itself where it is one already."""
    from transformers import Cache

    if isinstance(past_key_values, Cache):
        return past_key_values
    out = cls()
    pairs: Any = [] if past_key_values is None else past_key_values
    for i, (k, v) in enumerate(pairs):
        out.update(k, v, i)
    return out


def make_named(real: Any) -> Any:
    """Stands for cache classes of one kind of layers where code asks whether a cache is one: none is. Making one
    raises, since what its tensors held and where cannot be told of today's."""
    from transformers import DynamicCache

    class NamedCache(DynamicCache):
        """A cache class of transformers 4.x, by name alone."""

        def __init__(self, *sizes: Any, **old: Any) -> None:
            raise NotImplementedError("this cache class of transformers 4.x is gone and has no stand-in to be made")

    return real or NamedCache
