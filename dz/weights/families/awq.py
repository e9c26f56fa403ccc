"""AWQ: I32 words of eight codes packed along the output in an interleaved order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dz.weights.families.base import Declared, Family, Form, Parts

if TYPE_CHECKING:
    import torch

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that holds output j of each eight: 0 2 4 6 1 3 5 7, inverted


def match(parts: Parts) -> Form | None:
    """qweight I32 [K, N/8], scales [K/g, N], qzeros I32 [K/g, N/8]."""
    words, scales, zeros = parts.get("qweight"), parts.get("scales"), parts.get("qzeros")
    if words is None or scales is None or zeros is None or words.dtype != "I32" or len(words.shape) != 2:
        return None
    if (
        len(scales.shape) != 2
        or words.shape[1] * 8 != scales.shape[1]
        or zeros.shape != (scales.shape[0], words.shape[1])
    ):
        return None
    if words.shape[0] % max(scales.shape[0], 1):
        return None
    return Form(layout="int4", shape=(scales.shape[1], words.shape[0]), group=(words.shape[0] // scales.shape[0],))


def declared(quant: Mapping[str, Any], owner: Mapping[str, Any]) -> Declared | None:
    """quant_method awq with its bits and group size."""
    if quant.get("quant_method") != "awq":
        return None
    size = int(quant.get("group_size", quant.get("q_group_size", 128)))
    bits = int(quant.get("bits", quant.get("w_bit", 4)))
    return Declared(family="awq", producer="awq", layouts=(f"int{bits}",), group=(size,) if size > 0 else None)


def decode(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [N, K] = (code - zero) * scale."""
    import torch

    shifts = torch.tensor(ORDER, dtype=torch.int32) * 4
    codes = ((words.to(torch.int64)[..., None] >> shifts) & 15).flatten(-2)  # [K, N]
    zero = ((zeros.to(torch.int64)[..., None] >> shifts) & 15).flatten(-2)  # [groups, N]
    each = codes.shape[0] // zero.shape[0]
    offset, scale = zero.repeat_interleave(each, 0), scales.to(torch.float32).repeat_interleave(each, 0)
    return ((codes - offset).to(torch.float32) * scale).T


FAMILY = Family(
    name="awq",
    how="qweight I32 [K, N/8] with qzeros and scales [K/g, N]; quant_method awq",
    bits=lambda q: 4 + 20 / max(int(q.get("group_size", 128)), 1),
    match=match,
    declared=declared,
    loads="no loader unpacks it yet",
)
