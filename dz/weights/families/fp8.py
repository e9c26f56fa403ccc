"""FP8 with scales that multiply: per tensor, per output channel, per block; activations static or dynamic."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from dz.core.headers import TensorInfo
from dz.weights.families.base import Declared, Family, Form, Parts, formats_of, groups_of

if TYPE_CHECKING:
    import torch

VALUES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
SCALES = ("weight_scale_inv", "weight_scale", "scale", "_scale_inv", "_weight_scale", "_scale")
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
SIZES = (128, 64, 256, 32)  # extents of blocks tried in turn; the configuration's must agree
TENSOR, CHANNEL, BLOCKS, EXPERT, PROJECTION = "tensor", "channel", "blocks", "expert", "expert and projection"


def match(parts: Parts) -> Form | None:
    """One F8 tensor and one scale whose shape says what it covers."""
    values = parts.get("weight") or parts.get("")
    scale = next((parts[r] for r in SCALES if r in parts), None)
    if values is None or scale is None or values.dtype not in VALUES or scale.dtype not in SCALE_DTYPES:
        return None
    return _by_shape(values, scale)


def _by_shape(values: TensorInfo, scale: TensorInfo) -> Form | None:
    v, s = values.shape, scale.shape
    if len(v) < 2:
        return None
    if prod(s) == 1:
        return Form(layout=TENSOR, shape=v)
    if len(v) == 3 and s == (v[0], 2) and v[1] != 2:
        return Form(layout=PROJECTION, shape=v)
    if len(v) == 3 and s[0] == v[0] and prod(s) == v[0]:
        return Form(layout=EXPERT, shape=v)
    if s in (v[:-1], (*v[:-1], 1)):
        return Form(layout=CHANNEL, shape=v, group=(1, 0))
    if len(v) == 3 and s == (v[0], 1, v[2]):  # experts stored input first: the channel is the last axis
        return Form(layout=CHANNEL, shape=v, group=(0, 1))
    if len(s) == len(v) and s[:-2] == v[:-2]:
        rows, columns = _extent(v[-2], s[-2]), _extent(v[-1], s[-1])
        if rows and columns:
            return Form(layout=BLOCKS, shape=v, group=(rows, columns))
    return None


def _extent(size: int, count: int) -> int:
    """The extent of a block of which `count` cover `size`; 0 when no usual one does."""
    if count == size:
        return 1
    return next((b for b in SIZES if -(-size // b) == count), 0)


def declared(quant: Mapping[str, Any], owner: Mapping[str, Any]) -> Declared | None:
    """fp8, fbgemm_fp8, modelopt FP8, quark fp8 and compressed-tensors float-quantized."""
    method, algo = str(quant.get("quant_method", "")), str(quant.get("quant_algo", "")).upper()
    if method == "fp8":
        block = quant.get("weight_block_size")
        if block == [1, 32]:
            return None
        scheme = str(quant.get("activation_scheme") or "")
        if isinstance(block, list):
            return Declared(
                family="fp8", producer=method, layouts=(BLOCKS,), group=tuple(int(b) for b in block), activations=scheme
            )
        return Declared(
            family="fp8", producer=method, layouts=(TENSOR, CHANNEL, EXPERT, PROJECTION), activations=scheme
        )
    if method == "fbgemm_fp8":
        return Declared(family="fp8", producer=method, layouts=(CHANNEL,))
    if algo.startswith("FP8"):
        return Declared(
            family="fp8", producer="modelopt", layouts=(TENSOR, EXPERT, PROJECTION, CHANNEL), activations="static"
        )
    if method == "quark" and str(((quant.get("global_quant_config") or {}).get("weight") or {}).get("dtype")) in (
        "fp8_e4m3",
        "fp8_e5m2",
    ):
        return Declared(family="fp8", producer=method, layouts=(TENSOR, CHANNEL))
    if method == "compressed-tensors" and "float-quantized" in formats_of(quant):
        return _compressed(quant)
    return None


def _compressed(quant: Mapping[str, Any]) -> Declared | None:
    weights = [w for w in groups_of(quant) if w.get("num_bits", 8) == 8]
    layouts = {TENSOR: (TENSOR, EXPERT, PROJECTION), "channel": (CHANNEL,), "block": (BLOCKS,)}
    found = {name for w in weights for name in layouts.get(str(w.get("strategy")), ())}
    block = next((w["block_structure"] for w in weights if isinstance(w.get("block_structure"), list)), None)
    return Declared(
        family="fp8",
        producer="compressed-tensors",
        layouts=tuple(sorted(found)) or (TENSOR, CHANNEL),
        group=tuple(int(b) for b in block) if block else None,
    )


def decode(values: torch.Tensor, scale: torch.Tensor, form: Form) -> torch.Tensor:
    """float32 values * scale, the scale spread over what its form says that it covers. Inputs are not changed."""
    import torch

    wide, s = values.to(torch.float32), scale.to(torch.float32)
    if form.layout == TENSOR:
        return wide * s.reshape(())
    if form.layout == EXPERT:
        return wide * s.reshape(-1, 1, 1)
    if form.layout == PROJECTION:
        half = wide.shape[-2] // 2
        return wide * s.repeat_interleave(half, 1)[..., None]
    if form.layout == CHANNEL:
        return wide * (s if s.dim() == wide.dim() else s[..., None])
    rows, columns = form.group
    spread = s.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide * spread[..., : wide.shape[-2], : wide.shape[-1]]


def bits(quant: Mapping[str, Any]) -> float:
    """8, and a fp32 scale for each block where blocks are declared."""
    block = quant.get("weight_block_size")
    return 8 + 32 / (block[0] * block[1]) if isinstance(block, list) and len(block) == 2 else 8


FAMILY = Family(
    name="fp8",
    how="one F8 tensor and a float scale whose shape says tensor, channel, expert or block; declared as fp8",
    bits=bits,
    match=match,
    declared=declared,
    loads="no loader folds its scales yet",
)
