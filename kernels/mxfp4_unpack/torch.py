"""MXFP4 unpacked by a table of byte pairs, in the result's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.refuse import dtypes, one_device, support, unknown
from dz.ops.mxfp4_unpack import BLOCK, E2M1, blocks, scale_of

OUTPUTS = ("bfloat16", "float32")


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256]: the two values of each byte, the low nibble first, seen as one whole number: one gather for two values."""
    values = torch.tensor(E2M1, dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), -1)
    return pairs.view(torch.int32 if dtype == torch.bfloat16 else torch.int64).flatten().to(device)


def run(packed: Tensor, scales: Tensor, *, dtype: str = "bfloat16") -> Tensor:
    """See dz.ops.mxfp4_unpack.reference."""
    codes, exps = blocks(packed, scales)
    kind = getattr(torch, dtype)
    values = _pairs(kind, packed.device).index_select(0, codes.flatten().int()).view(kind).view(*exps.shape, BLOCK)
    return values.mul_(scale_of(exps, kind)[..., None]).flatten(-2)


def supports(args: Mapping[str, Any]) -> Support:
    """Both layouts of the op to bfloat16 or float32."""
    dtype = args.get("dtype", "bfloat16")
    return support(
        unknown(args, ("packed", "scales", "dtype")),
        dtypes(args, ("packed",), ("uint8", "int8")),
        dtypes(args, ("scales",), ("uint8", "float8_e8m0fnu")),
        one_device(args),
        f"unpacks to {' and '.join(OUTPUTS)}, not {dtype}" if dtype not in OUTPUTS else "",
    )


KERNEL = Kernel(
    op="mxfp4_unpack",
    technique="torch",
    summary="table of byte pairs, both layouts, on any device",
    run=run,
    requires=Requires(dtypes=OUTPUTS),
    supports=supports,
)
