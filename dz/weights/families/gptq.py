"""GPTQ: I32 words packed along the input, zeros packed along the output, a group index for each input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dz.weights.families.base import Declared, Family, Form, Parts

if TYPE_CHECKING:
    import torch


def match(parts: Parts) -> Form | None:
    """qweight I32 [K*bits/32, N], scales [K/g, N], qzeros I32 [K/g, N*bits/32]; `g_idx` [K] tells K."""
    words, scales, zeros = parts.get("qweight"), parts.get("scales"), parts.get("qzeros")
    if words is None or scales is None or zeros is None or words.dtype != "I32" or len(words.shape) != 2:
        return None
    if len(scales.shape) != 2 or len(zeros.shape) != 2 or words.shape[1] != scales.shape[1] or not scales.shape[1]:
        return None
    bits = 32 * zeros.shape[1] // scales.shape[1]
    if bits not in (2, 3, 4, 8):
        return None
    width = words.shape[0] * 32 // bits
    index = parts.get("g_idx")
    if (index is not None and index.shape != (width,)) or width % scales.shape[0]:
        return None
    return Form(layout=f"int{bits}", shape=(words.shape[1], width), group=(width // scales.shape[0],))


def declared(quant: Mapping[str, Any], owner: Mapping[str, Any]) -> Declared | None:
    """quant_method gptq (or the marlin form's own name) with its bits and group size (-1: one group)."""
    if quant.get("quant_method") not in ("gptq", "gptq_marlin"):
        return None
    size = int(quant.get("group_size", -1))
    return Declared(
        family="gptq",
        producer=str(quant["quant_method"]),
        layouts=(f"int{int(quant.get('bits', 4))}",),
        group=(size,) if size > 0 else None,
    )


def decode(
    words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, index: torch.Tensor, *, bits: int
) -> torch.Tensor:
    """float32 [N, K] = (code - (zero + 1)) * scale of the input's group; low bits first. `bits` divides 32."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    mask = (1 << bits) - 1
    codes = ((words.to(torch.int64)[:, None, :] >> shifts[None, :, None]) & mask).flatten(0, 1)  # [K, N]
    zero = ((zeros.to(torch.int64)[..., None] >> shifts) & mask).flatten(-2) + 1  # [groups, N]
    group = index.long()
    return ((codes - zero[group]).to(torch.float32) * scales.to(torch.float32)[group]).T


FAMILY = Family(
    name="gptq",
    how="qweight I32 [K*bits/32, N] with scales of the same N, qzeros and g_idx; quant_method gptq",
    bits=lambda q: int(q.get("bits", 4)) + (16 + int(q.get("bits", 4))) / max(int(q.get("group_size", 128)), 1),
    match=match,
    declared=declared,
    loads="no loader unpacks it yet",
)
