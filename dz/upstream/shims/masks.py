"""The attention-mask helpers of transformers 4.x: [B, 1, Q, K] additive masks from a padding mask [B, K].

0 where a query may look, the dtype's least number where it may not. The old helpers chose between forms by what was
passed; these always give the explicit mask, which every attention function takes and which means the same."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch


def _allowed(
    shape: tuple[int, int], past: int, window: int | None, device: torch.device, causal: bool = True
) -> torch.Tensor:
    """[Q, K] bool: the last query stands at the last key; `window` counts the query's own place."""
    queries = torch.arange(shape[1], device=device)[:, None] + past
    keys = torch.arange(shape[1] + past, device=device)[None]
    seen = keys <= queries if causal else torch.ones_like(keys <= queries)
    return seen & (keys > queries - window) if window else seen


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)


def _whole(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask [B, 1, Q, K] as an additive one: a float mask without a one in it is one already."""
    if mask.dtype.is_floating_point and not bool((mask > 0).any()):
        return mask.to(dtype)
    return _additive(mask.bool(), dtype)


def causal_mask(
    attention_mask: torch.Tensor | None,
    input_shape: Any,
    inputs_embeds: torch.Tensor,
    past_key_values_length: int,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """[B, 1, Q, K] of a padding mask [B, K] (None: no padding) or of a mask that has four dimensions already."""
    batch, queries = int(input_shape[0]), int(input_shape[-1])
    if attention_mask is not None and attention_mask.dim() == 4:
        return _whole(attention_mask, inputs_embeds.dtype)
    allowed = _allowed((batch, queries), past_key_values_length, sliding_window, inputs_embeds.device)
    allowed = allowed[None, None].expand(batch, 1, -1, -1)
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None, None, :].bool()
    return _additive(allowed, inputs_embeds.dtype)


def causal_mask_for_sdpa(
    attention_mask: torch.Tensor | None,
    input_shape: Any,
    inputs_embeds: torch.Tensor,
    past_key_values_length: int,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """As `causal_mask`; a query that may look nowhere looks everywhere, as the fused attention needs it."""
    mask = causal_mask(attention_mask, input_shape, inputs_embeds, past_key_values_length, sliding_window)
    return unmask_unattended(mask, torch.finfo(mask.dtype).min)


def padding_mask(mask: torch.Tensor, dtype: torch.dtype, tgt_len: int | None = None) -> torch.Tensor:
    """[B, 1, T, K] of a padding mask [B, K]: the same row for each of the `tgt_len` queries."""
    batch, keys = mask.shape
    wide = mask[:, None, None, :].bool().expand(batch, 1, keys if tgt_len is None else tgt_len, keys)
    return _additive(wide, dtype)


def unmask_unattended(expanded_mask: torch.Tensor, min_dtype: float) -> torch.Tensor:
    """A mask in which rows that allow nothing allow everything."""
    return expanded_mask.mul(~torch.all(expanded_mask == min_dtype, dim=-1, keepdim=True))


def make_converter(real: Any) -> type:
    """The class of 4.x that holds a causal rule."""
    return MaskConverter


class MaskConverter:
    """A rule of who may look at whom: causal or not, with a window or without."""

    def __init__(self, is_causal: bool, sliding_window: int | None = None) -> None:
        self.is_causal, self.sliding_window = is_causal, sliding_window

    def to_causal_4d(
        self, batch_size: int, query_length: int, key_value_length: int, dtype: torch.dtype, device: Any = "cpu"
    ) -> torch.Tensor | None:
        """[B, 1, Q, K] without padding; None where nothing is masked."""
        if not self.is_causal or (query_length == 1 and self.sliding_window is None):
            return None
        past = key_value_length - query_length
        allowed = _allowed((batch_size, query_length), past, self.sliding_window, torch.device(device))
        return _additive(allowed[None, None].expand(batch_size, 1, -1, -1), dtype)

    def to_4d(
        self,
        attention_mask_2d: torch.Tensor,
        query_length: int,
        dtype: torch.dtype,
        key_value_length: int | None = None,
    ) -> torch.Tensor:
        """[B, 1, Q, K] of a padding mask [B, K]."""
        batch, keys = attention_mask_2d.shape
        if key_value_length is None and self.is_causal:
            raise ValueError("a causal mask needs the number of keys")
        past = (key_value_length or keys) - query_length
        shape = (batch, query_length)
        allowed = _allowed(shape, past, self.sliding_window, attention_mask_2d.device, self.is_causal)
        return _additive(allowed[None, None] & attention_mask_2d[:, None, None, :].bool(), dtype)

    @staticmethod
    def _unmask_unattended(expanded_mask: torch.Tensor, min_dtype: float) -> torch.Tensor:
        return unmask_unattended(expanded_mask, min_dtype)

    @staticmethod
    def _ignore_causal_mask_sdpa(
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor,
        past_key_values_length: int,
        sliding_window: int | None = None,
        is_training: bool = False,
    ) -> bool:
        """Whether the attention may do without a mask: no padding, and one query or no past (it is causal itself)."""
        queries = int(inputs_embeds.shape[1])
        keys = queries + int(past_key_values_length)
        if sliding_window is not None and keys >= sliding_window:
            return False
        whole = attention_mask is None or (attention_mask.dim() == 2 and bool(attention_mask.bool().all()))
        return whole and (queries == 1 or queries == keys)


def make_causal(real: Any) -> Any:
    """The helper for plain attention."""
    return causal_mask


def make_causal_sdpa(real: Any) -> Any:
    """The helper for fused attention."""
    return causal_mask_for_sdpa


def make_padding(real: Any) -> Any:
    """The helper for padding alone."""
    return padding_mask


def _taking(real: Any, dropped: tuple[str, ...], renamed: dict[str, str]) -> Any:
    """A function of today's that takes arguments by their old names; `dropped` are those that say what others say."""
    names = inspect.signature(real).parameters
    renames = {old: new for old, new in renamed.items() if old not in names and new in names}
    drops = {name for name in dropped if name not in names}

    @functools.wraps(real)
    def taking(*args: Any, **given: Any) -> Any:
        return real(*args, **{renames.get(k, k): v for k, v in given.items() if k not in drops})

    return taking


def make_mask_function(real: Any) -> Any:
    """Today's mask function under the old names: `cache_position` said where the cache ends, which the cache says."""
    return real if real is None else _taking(real, ("cache_position",), {"input_embeds": "inputs_embeds"})
