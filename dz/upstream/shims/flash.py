"""Softmax attention and padding helpers in torch, with the call of the flash-attn package.

Layouts: q [B, S, H, D], k and v [B, T, G, D] with H a multiple of G; the causal diagonal ends at the last key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """[B, S, H, Dv] in q's dtype. A query that may look at no key gives zeros, as the kernel does.

    Raises NotImplementedError for dropout, slopes and the probabilities."""
    _refuse({"dropout_p": dropout_p, "alibi_slopes": alibi_slopes, "return_attn_probs": return_attn_probs})
    group = q.shape[2] // k.shape[2]
    keys, vals = (x.repeat_interleave(group, 2).float() for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q.float(), keys) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = _seen(q.shape[1], k.shape[1], causal, window_size, q.device)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).nan_to_num(0.0)
    return torch.einsum("bhst,bthd->bshd", weights, vals).to(q.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, H, Dv] of packed sequences: q [N, H, D], k and v [M, G, D], cut at `cu_seqlens_*` [B + 1]."""
    refused = {"dropout_p": dropout_p, "alibi_slopes": alibi_slopes, "return_attn_probs": return_attn_probs}
    _refuse({**refused, "block_table": block_table})
    out = []
    cuts = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)
    at_q = at_k = 0
    for n, m in cuts:
        parts = q[None, at_q : at_q + n], k[None, at_k : at_k + m], v[None, at_k : at_k + m]
        one = flash_attn_func(
            *parts, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap
        )
        out.append(one[0])
        at_q, at_k = at_q + n, at_k + m
    return torch.cat(out) if out else q.new_zeros(0, q.shape[1], v.shape[-1])


def _seen(queries: int, keys: int, causal: bool, window: Iterable[int], device: torch.device) -> torch.Tensor:
    left, right = window
    q = torch.arange(queries, device=device)[:, None] + keys - queries
    k = torch.arange(keys, device=device)[None]
    right = 0 if causal else right
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if right >= 0:
        seen &= k <= q + right
    return seen & (k >= q - left) if left >= 0 else seen


def _refuse(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, bool | float | int):
            raise NotImplementedError(f"the stand-in for flash attention takes no {name}")
        if value:
            raise NotImplementedError(f"the stand-in for flash attention takes no {name}={value}")


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: Any = None) -> Any:
    """(tokens [N, ...] without padding, their indices, cu_seqlens [B + 1] int32, the longest, lengths [B] int32)."""
    if unused_mask is not None:
        raise NotImplementedError("the stand-in for flash attention takes no unused_mask")
    indices, cu, longest = get_unpad_data(attention_mask)
    flat = hidden_states.flatten(0, 1)
    return flat[indices], indices, cu, longest, cu.diff()


def get_unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(indices of the tokens [N], cu_seqlens [B + 1] int32, the longest) of a padding mask [B, T]."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    cu = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return attention_mask.flatten().nonzero().flatten(), cu, int(lengths.max())


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows of x."""
    return x[indices]


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """[B, T, ...] with the tokens [N, ...] at their indices and zeros elsewhere."""
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return out.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def make_flash_attn_func(real: Any) -> Any:
    """Attention of whole rows."""
    return real or flash_attn_func


def make_flash_attn_varlen_func(real: Any) -> Any:
    """Attention of packed sequences."""
    return real or flash_attn_varlen_func


def make_unpad_input(real: Any) -> Any:
    """Take padding out."""
    return real or unpad_input


def make_pad_input(real: Any) -> Any:
    """Put padding back."""
    return real or pad_input


def make_index_first_axis(real: Any) -> Any:
    """Pick rows."""
    return real or index_first_axis


def make_get_unpad_data(real: Any) -> Any:
    """Where the tokens are."""
    return real or get_unpad_data
