"""How torch holds what safetensors stores."""

from __future__ import annotations

import torch

from dz.core.headers import TensorInfo
from dz.errors import Refused

# F8_E8M0 is an exponent byte (scales); F4 holds two values a byte, so torch's last dimension is half of the file's.
_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a stored tensor. Raises Refused for one that this torch has not (6-bit floats have none)."""
    dtype = getattr(torch, _TORCH.get(info.dtype, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise Refused(
            f"{info.name!r} is {info.dtype}",
            f"torch {torch.__version__} has no such dtype",
            "use a checkpoint in another format",
            code="no_dtype",
        )
    return dtype


def torch_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape as torch holds it: the stored one, but for packed 4-bit values half of it in the last dimension."""
    if info.dtype != "F4":
        return info.shape
    if not info.shape or info.shape[-1] % 2:
        raise Refused(
            f"{info.name!r} is F4 {list(info.shape)}",
            "two values share a byte, so the last dimension must be even",
            "use a checkpoint in another format",
            code="odd_f4",
        )
    return (*info.shape[:-1], info.shape[-1] // 2)
