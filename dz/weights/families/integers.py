"""INT4 and INT8 of compressed-tensors: `pack-quantized` words and plain `int-quantized` bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dz.weights.families.base import Declared, Family, Form, Parts, formats_of, groups_of

if TYPE_CHECKING:
    import torch

FLOATS = ("F32", "BF16", "F16")
BYTES, WORDS = "bytes", "words"


def match(parts: Parts) -> Form | None:
    """I32 words [N, K*bits/32] beside `weight_shape` and `weight_scale` [N, K/g], or I8 [N, K] with one scale a row.
    Headers do not tell the bits of words (int4 by 128 looks like int8 by 64): `settle` takes them as declared."""
    scale = parts.get("weight_scale")
    if scale is None or scale.dtype not in FLOATS:
        return None
    words = parts.get("weight_packed")
    if words is not None and words.dtype == "I32" and "weight_shape" in parts:
        if len(words.shape) < 2 or words.shape[:-1] != scale.shape[:-1] or not scale.shape[-1]:
            return None
        width = words.shape[-1] * 8
        return Form(layout=WORDS, shape=(*words.shape[:-1], width), group=(-(-width // scale.shape[-1]),))
    values = parts.get("weight")
    if values is not None and values.dtype == "I8" and len(values.shape) > 1:
        rows = values.shape[:-1]
        if scale.shape in ((*rows, 1), rows, (1,), ()):
            return Form(layout=BYTES, shape=values.shape, group=(0,))
    return None


def settle(form: Form, declared: Declared) -> Form | None:
    """Words with the declared bits; None where the declared group gives another number of scales."""
    if form.layout != WORDS or declared.layouts == (BYTES,):
        return form
    bits = int(declared.layouts[0][3])
    scales = -(-form.shape[-1] // form.group[0])
    width = form.shape[-1] * 4 // bits
    size = declared.group[0] if declared.group else 0
    if scales != (-(-width // size) if size else 1):
        return None
    return Form(layout=declared.layouts[0], shape=(*form.shape[:-1], width), group=(size,))


def declared(quant: Mapping[str, Any], owner: Mapping[str, Any]) -> Declared | None:
    """compressed-tensors pack-quantized or int-quantized."""
    if quant.get("quant_method") != "compressed-tensors":
        return None
    names = formats_of(quant)
    weights = [w for w in groups_of(quant) if w.get("type", "int") == "int"]
    size = next((int(w["group_size"]) for w in weights if w.get("group_size")), 0)
    if "pack-quantized" in names:
        bits = next((int(w["num_bits"]) for w in weights if w.get("num_bits")), 4)
        group = (size,) if size > 0 else (0,)
        return Declared(family="int", producer="compressed-tensors", layouts=(f"int{bits} words",), group=group)
    if "int-quantized" in names:
        return Declared(family="int", producer="compressed-tensors", layouts=(BYTES,))
    return None


def decode(words: torch.Tensor, scales: torch.Tensor, *, bits: int, width: int) -> torch.Tensor:
    """float32 [N, width]: the low bits of a word first, an offset of 2^(bits-1), one scale for each group."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    mask = (1 << bits) - 1
    values = ((words.to(torch.int64)[..., None] >> shifts) & mask).flatten(-2)[..., :width] - (1 << (bits - 1))
    return values.to(torch.float32) * scales.to(torch.float32).repeat_interleave(width // scales.shape[-1], -1)


def nominal(quant: Mapping[str, Any]) -> float:
    """The declared bits and a 16-bit scale for each group."""
    weights = groups_of(quant)
    bits = next((int(w["num_bits"]) for w in weights if w.get("num_bits")), 4)
    size = next((int(w["group_size"]) for w in weights if w.get("group_size")), 0)
    return bits + (16 / size if size > 0 else 0)


FAMILY = Family(
    name="int",
    how="I32 words with weight_shape and a float weight_scale, or I8 with one scale a row; compressed-tensors",
    bits=nominal,
    match=match,
    declared=declared,
    settle=settle,
    loads="no loader unpacks it yet",
)
