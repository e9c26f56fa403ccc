"""MXFP4: four-bit codes, one exponent byte for 32 of them. Layouts, detection and values are in dz/weights/mxfp4.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dz.core.headers import TensorInfo
from dz.ops.mxfp4_unpack import BLOCK
from dz.weights.families.base import Declared, Family, Form, Parts
from dz.weights.mxfp4 import declaration, match_pair

# roles of codes and scales -> the layout's name
PAIRS = {
    ("_blocks", "_scales"): "blocks",
    ("weight_packed", "weight_scale"): "packed",
    ("weight", "weight_scale"): "weight and weight_scale",
    ("weight", "scale"): "weight and scale",
}
_OF_PRODUCER = {
    "mxfp4": "blocks",
    "compressed-tensors": "packed",
    "quark": "weight and weight_scale",
    "fp8 with fp4 experts": "weight and scale",
}
WORDS = "words"


def match(parts: Parts) -> Form | None:
    """Byte codes with one scale byte for 16 of them, or 32-bit words of eight codes with one for four of them."""
    for (codes, scales), layout in PAIRS.items():
        if codes in parts and scales in parts:
            found = match_pair(codes, parts[codes], parts[scales])
            fits = found is not None and (found.layout == "blocks") == (layout == "blocks")
            if found is not None and fits:
                return Form(layout=layout, shape=found.shape, group=(BLOCK,))
    if "weight" in parts and "scales" in parts:
        return _words(parts["weight"], parts["scales"])
    return None


def _words(codes: TensorInfo, scales: TensorInfo) -> Form | None:
    if codes.dtype != "U32" or scales.dtype != "U8" or not codes.shape or codes.shape[:-1] != scales.shape[:-1]:
        return None
    if codes.shape[-1] * 8 != scales.shape[-1] * BLOCK:
        return None
    return Form(layout=WORDS, shape=(*codes.shape[:-1], codes.shape[-1] * 8), group=(BLOCK,))


def declared(quant: Mapping[str, Any], owner: Mapping[str, Any]) -> Declared | None:
    """The producer, by the names that each uses; `quantization.mode` is the words' producer's."""
    if quant.get("mode") == "mxfp4":
        return Declared(family="mxfp4", producer="mode mxfp4", layouts=(WORDS,), group=(BLOCK,))
    found = declaration({**owner, "quantization_config": dict(quant)})
    if found is None:
        return None
    return Declared(family="mxfp4", producer=found.producer, layouts=(_OF_PRODUCER[found.producer],), group=(BLOCK,))


FAMILY = Family(
    name="mxfp4",
    how="U8 or I8 codes with one U8 or F8_E8M0 byte for 32 values; quant_method and names must be one producer's",
    bits=lambda _: 4 + 8 / BLOCK,
    match=match,
    declared=declared,
    loads="dz unpacks it by kernel or reference; a model's class must take packed experts to be loaded",
)
