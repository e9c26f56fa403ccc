"""MXFP4 in a checkpoint: found from headers and config alone, checked against each other, packed and unpacked.

Four producers write it: stacked experts as `*_blocks` [E, N, K/32, 16] with `*_scales` [E, N, K/32] (quant_method
mxfp4), and flat [N, K/2] with [N, K/32] under three pairs of names (compressed-tensors mxfp4-pack-quantized; fp8 with
expert_dtype fp4; quark fp4). All hold the even element in the low nibble and a scale byte of `2^(byte - 127)`. Headers
cannot tell the nibble order: swapped nibbles keep every statistic. It follows from the declared producer, so an
undeclared one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dz.core.headers import TensorInfo
from dz.errors import Refused
from dz.ops.mxfp4_unpack import BLOCK, as_bytes, reference

# (suffix of the codes, suffix of the scales), the more particular names first
PAIRS = (
    ("_blocks", "_scales"),
    (".weight_packed", ".weight_scale"),
    (".weight", ".weight_scale"),
    (".weight", ".scale"),
)
SCALE_DTYPES = ("U8", "F8_E8M0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A quantised tensor `name` of logical `shape` [..., N, K] (K, the last axis, is the input) and its two parts."""

    name: str
    codes: str
    scales: str
    layout: Literal["blocks", "flat"]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a config says of its MXFP4 tensors: who wrote them, under which pair of suffixes, in which layout."""

    producer: str
    suffixes: tuple[str, str]
    layout: Literal["blocks", "flat"]


def declaration(config: Mapping[str, Any]) -> Declaration | None:
    """The MXFP4 declaration in a model's config (`quantization_config` at the top or in `text_config`), None without
    one. Raises Refused for a declared group size other than 32."""
    quant, owner = _quantization(config)
    method = quant.get("quant_method")
    if method == "mxfp4":
        return Declaration(producer="mxfp4", suffixes=PAIRS[0], layout="blocks")
    if method == "compressed-tensors":
        groups = [g for g in (quant.get("config_groups") or {}).values() if isinstance(g, Mapping)]
        formats = {quant.get("format"), *(g.get("format") for g in groups)}
        if "mxfp4-pack-quantized" in formats:
            for group in groups:
                _check_group((group.get("weights") or {}).get("group_size"), method)
            return Declaration(producer=method, suffixes=PAIRS[1], layout="flat")
    if method == "quark":
        weight = (quant.get("global_quant_config") or {}).get("weight") or {}
        if weight.get("dtype") == "fp4" and weight.get("scale_format") == "e8m0":
            _check_group(weight.get("group_size"), method)
            return Declaration(producer=method, suffixes=PAIRS[2], layout="flat")
    if method == "fp8" and "fp4" in (quant.get("expert_dtype"), owner.get("expert_dtype"), config.get("expert_dtype")):
        return Declaration(producer="fp8 with fp4 experts", suffixes=PAIRS[3], layout="flat")
    return None


def _quantization(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(quantization_config, the config that holds it); empty without one."""
    for owner in (config, config.get("text_config")):
        if isinstance(owner, Mapping) and isinstance(quant := owner.get("quantization_config"), Mapping):
            return quant, owner
    return {}, config


def _check_group(size: Any, producer: str) -> None:
    if size not in (None, BLOCK):
        raise Refused(
            f"MXFP4 of {producer} with group size {size}",
            f"one scale for {BLOCK} values is MXFP4",
            "check quantization_config",
            code="mxfp4_mismatch",
        )


def pairs(headers: Mapping[str, TensorInfo]) -> Iterator[Packed]:
    """Every pair of tensors whose dtypes and shapes are those of MXFP4, whatever the config says."""
    for name in sorted(headers):
        for suffix, scale_suffix in PAIRS:
            stem = name.removesuffix(suffix)
            if stem != name and (scales := headers.get(stem + scale_suffix)) is not None:
                found = match_pair(stem if suffix == "_blocks" else f"{stem}.weight", headers[name], scales)
                if found is not None:
                    yield found
                    break


def match_pair(name: str, codes: TensorInfo, scales: TensorInfo) -> Packed | None:
    """The Packed of two tensors if their shapes fit: one scale byte for 16 bytes of codes."""
    if codes.dtype not in ("U8", "I8") or scales.dtype not in SCALE_DTYPES or not scales.shape:
        return None
    shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
    if codes.shape == (*scales.shape, BLOCK // 2):
        return Packed(name=name, codes=codes.name, scales=scales.name, layout="blocks", shape=shape)
    if codes.shape == (*scales.shape[:-1], scales.shape[-1] * (BLOCK // 2)):
        return Packed(name=name, codes=codes.name, scales=scales.name, layout="flat", shape=shape)
    return None


def detect(headers: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> tuple[Packed, ...]:
    """The MXFP4 tensors of a checkpoint, by name; empty when there are none and none are declared.

    Raises Refused when headers and config disagree: pairs without a declaration, a declaration without pairs, or a pair
    under other names or in another layout than its producer writes."""
    found = tuple(pairs(headers))
    declared = declaration(config)
    if declared is None:
        if found:
            raise Refused(
                f"{found[0].codes} looks like MXFP4, and {len(found) - 1} more",
                "quantization_config declares no known producer, and headers do not tell the nibble order",
                "ask the publisher for the format; see `dz recipes ls`",
                code="mxfp4_undeclared",
            )
        return ()
    if not found:
        raise Refused(
            f"no MXFP4 tensor, though quantization_config declares it ({declared.producer})",
            f"no pair *{declared.suffixes[0]} with *{declared.suffixes[1]} has one scale byte for 16 bytes",
            "check the files: `dz fetch MODEL --verify`",
            code="mxfp4_mismatch",
        )
    for p in found:
        if p.layout != declared.layout or not p.codes.endswith(declared.suffixes[0]):
            raise Refused(
                f"{p.codes} is MXFP4 in the {p.layout} layout",
                f"{declared.producer} writes *{declared.suffixes[0]} in the {declared.layout} layout",
                "check quantization_config",
                code="mxfp4_mismatch",
            )
    _no_half_pairs(headers, declared)
    return found


def _no_half_pairs(headers: Mapping[str, TensorInfo], declared: Declaration) -> None:
    """Refuse byte tensors under the producer's suffix whose partner is missing or of another shape."""
    suffix, scale_suffix = declared.suffixes
    for name, codes in headers.items():
        if not name.endswith(suffix) or codes.dtype not in ("U8", "I8"):
            continue
        scales = headers.get(name.removesuffix(suffix) + scale_suffix)
        if scales is None or match_pair(name, codes, scales) is None:
            partner = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise Refused(
                f"{name} {list(codes.shape)} has no fitting scales",
                f"{declared.producer} puts them in *{scale_suffix}: {partner}",
                "check the files: `dz fetch MODEL --verify`",
                code="mxfp4_mismatch",
            )


def check_scales(scales: Tensor, name: str) -> None:
    """Refuse a scale byte of 255 (NaN in E8M0): a checkpoint that holds one is damaged."""
    bad = int((as_bytes(scales, "scales") == 255).sum())
    if bad:
        raise Refused(
            f"{name} holds {bad} scale bytes of 255",
            "that is NaN: 32 weights each would be NaN",
            "fetch the file again: `dz fetch MODEL --force`",
            code="mxfp4_nan",
        )


def unpack(codes: Tensor, scales: Tensor, name: str, *, dtype: str = "bfloat16") -> Tensor:
    """The checked values [..., K] of one tensor: `check_scales`, then the op's reference."""
    check_scales(scales, name)
    return reference(codes, scales, dtype=dtype)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., K/2], scales uint8 [..., K/32]) of x [..., K], K a multiple of 32: the scale is
    `2^(floor(log2(amax)) - 2)`, codes are rounded to nearest, ties to the even code, saturating at 6 (OCP Microscaling
    1.0, section 6.3). A block of zeros has scale byte 0. NaN and infinity raise Refused."""
    if not bool(torch.isfinite(x).all()):
        raise Refused(
            "values that are not finite",
            "MXFP4 has neither infinity nor NaN among its codes",
            "check the source tensor",
            code="not_finite",
        )
    blocks = x.double().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    exponent = torch.frexp(amax).exponent - 1  # floor(log2), exactly
    byte = torch.where(amax > 0, exponent - 2 + 127, 0).clamp(0, 254)
    scaled = torch.ldexp(blocks, (127 - byte)[..., None].expand(blocks.shape))
    codes = _nearest(scaled.abs()) | (scaled.signbit().to(torch.uint8) << 3)
    flat = codes.flatten(-2)
    return flat[..., 0::2] | (flat[..., 1::2] << 4), byte.to(torch.uint8)


def _nearest(magnitude: Tensor) -> Tensor:
    """The code 0..7 (uint8) nearest to each magnitude; of two equally near the even one."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64, device=magnitude.device)
    middles = (values[1:] + values[:-1]) / 2
    below = torch.bucketize(magnitude, middles)  # a value on middle i goes to code i, the lower one
    tie = (magnitude[..., None] == middles).any(-1)
    return (below + (tie & (below % 2 == 1)).long()).to(torch.uint8)


def to_blocks(codes: Tensor) -> Tensor:
    """Flat codes [..., K/2] in the stacked layout [..., K/32, 16]: the same bytes."""
    return codes.unflatten(-1, (-1, BLOCK // 2))
