"""What the techniques of paged latent decode take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dz.core.kernel import Support
from dz.kernels.common.parts import HALVES
from dz.kernels.common.refuse import dtypes, one_device, same_dtype, support, unknown


def supports(args: Mapping[str, Any]) -> Support:
    """Caches in q's dtype or packed, their blocks without gaps between; contiguous tables of int32."""
    q, cache, sink = args["q"], args["cache"], args.get("sink")
    tables = ("block_table", "lengths", *(("sink",) if sink is not None else ()))
    gaps = [name for name in tables if not args[name].is_contiguous()]
    gaps += ["cache"] if cache.stride(0) != cache.shape[1] * cache.stride(1) or cache.stride(2) != 1 else []
    gaps += ["q"] if q.stride(-1) != 1 else []
    return support(
        unknown(args, ("q", "cache", "block_table", "lengths", "scale", "value_dim", "sink")),
        dtypes(args, ("q",), HALVES),
        dtypes(args, ("cache",), (*HALVES, "uint8")),
        dtypes(args, ("block_table", "lengths"), ("int32",)),
        dtypes(args, ("sink",), ("float32",)),
        "" if cache.dtype == torch.uint8 else same_dtype(args, ("q", "cache")),
        one_device(args),
        f"{' and '.join(gaps)} with gaps" if gaps else "",
        "no blocks" if not cache.numel() or not args["block_table"].shape[1] else "",
    )
