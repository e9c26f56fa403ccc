"""MXFP8: e4m3 values, one exponent byte for 32 of them along the input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dz.weights.families.base import Declared, Family, Form, Parts, formats_of

if TYPE_CHECKING:
    import torch

BLOCK = 32
SCALES = ("weight_scale", "weight_scale_inv", "scale", "_scale", "_scale_inv")


def match(parts: Parts) -> Form | None:
    """F8_E4M3 [..., N, K] with a U8 or F8_E8M0 scale [..., N, K/32]."""
    values = parts.get("weight") or parts.get("")
    for role in SCALES:
        scale = parts.get(role)
        if values is None or scale is None or values.dtype != "F8_E4M3" or scale.dtype not in ("U8", "F8_E8M0"):
            continue
        if (
            len(values.shape) > 1
            and values.shape[:-1] == scale.shape[:-1]
            and values.shape[-1] == scale.shape[-1] * BLOCK
        ):
            return Form(layout="rows of 32", shape=values.shape, group=(1, BLOCK))
    return None


def declared(quant: Mapping[str, Any], owner: Mapping[str, Any]) -> Declared | None:
    """quant_method mxfp8, a format of that name, modelopt's quant_algo, or fp8 with a block of 1 x 32."""
    method = str(quant.get("quant_method", ""))
    algo = str(quant.get("quant_algo", "")).upper()
    block = quant.get("weight_block_size")
    if method == "mxfp8" or any("mxfp8" in f for f in formats_of(quant)) or algo == "MXFP8" or block == [1, BLOCK]:
        return Declared(family="mxfp8", producer=method or algo, layouts=("rows of 32",), group=(1, BLOCK))
    return None


def decode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., N, K] = e4m3 value * 2^(scale byte - 127) of its 32 neighbours along K."""
    import torch

    byte = scales.view(torch.uint8).to(torch.int32)
    wide = values.to(torch.float32).unflatten(-1, (-1, BLOCK))
    return torch.ldexp(wide, (byte - 127)[..., None]).flatten(-2)


FAMILY = Family(
    name="mxfp8",
    how="F8_E4M3 values with one U8 or F8_E8M0 byte for 32 along the input; declared as mxfp8",
    bits=lambda _: 8 + 8 / BLOCK,
    match=match,
    declared=declared,
    loads="no loader folds its scales yet",
)
