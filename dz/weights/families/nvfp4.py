"""NVFP4: four-bit codes, an e4m3 scale for 16 of them and one fp32 scale for all, in two opposite conventions.

`weight_scale_2` multiplies; `weight_global_scale` is its reciprocal and divides. Both keep the even element in the low
nibble. Taking one for the other raises nothing, so the producer must be declared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dz.weights.families.base import Declared, Family, Form, Parts, formats_of

if TYPE_CHECKING:
    import torch

BLOCK = 16
MULTIPLIES, DIVIDES = "scale multiplies", "scale divides"
_GLOBAL = {"weight_scale_2": MULTIPLIES, "weight_global_scale": DIVIDES, "_weight_scale_2": MULTIPLIES}
_CODES = ("weight", "weight_packed", "")


def match(parts: Parts) -> Form | None:
    """U8 [..., N, K/2] with F8_E4M3 [..., N, K/16]; the name of the whole scale tells the convention."""
    codes = next((parts[r] for r in _CODES if r in parts), None)
    scale = parts.get("weight_scale") or parts.get("_weight_scale")
    if codes is None or scale is None or codes.dtype not in ("U8", "I8") or scale.dtype != "F8_E4M3":
        return None
    if not codes.shape or codes.shape[:-1] != scale.shape[:-1] or codes.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        return None
    layout = next((name for role, name in _GLOBAL.items() if role in parts), "no whole scale")
    return Form(layout=layout, shape=(*codes.shape[:-1], codes.shape[-1] * 2), group=(BLOCK,))


def declared(quant: Mapping[str, Any], owner: Mapping[str, Any]) -> Declared | None:
    """modelopt's quant_algo NVFP4 (also in hf_quant_config.json), or compressed-tensors nvfp4-pack-quantized."""
    if "NVFP4" in str(quant.get("quant_algo", "")).upper():
        return Declared(family="nvfp4", producer="modelopt", layouts=(MULTIPLIES,), group=(BLOCK,))
    if quant.get("quant_method") == "compressed-tensors" and "nvfp4-pack-quantized" in formats_of(quant):
        return Declared(family="nvfp4", producer="compressed-tensors", layouts=(DIVIDES,), group=(BLOCK,))
    return None


def decode(codes: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor, form: Form) -> torch.Tensor:
    """float32 [..., N, K] = e2m1 code * e4m3 scale, times or by `whole` (0-d, or one for each leading index)."""
    import torch

    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)
    table = torch.cat([table, -table])
    byte = codes.view(torch.uint8).long()
    values = torch.stack([table[byte & 15], table[byte >> 4]], -1).flatten(-2)
    spread = scales.to(torch.float32).repeat_interleave(BLOCK, -1)
    factor = whole.to(torch.float32)
    factor = factor.reshape(*factor.shape, *(1,) * (values.dim() - factor.dim()))
    return values * spread * (factor if form.layout == MULTIPLIES else 1 / factor)


FAMILY = Family(
    name="nvfp4",
    how="U8 codes with one F8_E4M3 for 16; weight_scale_2 (multiplies) or weight_global_scale (divides), as declared",
    bits=lambda _: 4 + 8 / BLOCK,
    match=match,
    declared=declared,
    loads="no loader folds its two scales yet",
)
