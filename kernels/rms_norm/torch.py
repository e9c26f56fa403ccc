"""RMS normalisation by PyTorch's own fused function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, same_dtype, support, unknown


def run(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_first: bool = True,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See dz.ops.rms_norm.reference."""
    h = x if residual is None else x + residual
    width = h.shape[-1:]
    if weight is None or h.numel() == 0:
        dtype = torch.promote_types(h.dtype, weight.dtype) if weight is not None and cast_first else h.dtype
        out = F.rms_norm(h, width, None, eps).to(dtype)
    elif cast_first:
        out = F.rms_norm(h, width, None, eps) * (weight + offset if offset else weight)
    elif offset == 0.0 and weight.dtype == h.dtype:
        out = F.rms_norm(h, width, weight, eps)
    else:
        out = F.rms_norm(h.float(), width, weight.float() + offset, eps).to(h.dtype)
    return out if residual is None else (out, h)


def supports(args: Mapping[str, Any]) -> Support:
    """Every argument of the op; the three float dtypes, x and residual of one dtype and shape, a weight of one row."""
    x, weight, residual = args["x"], args.get("weight"), args.get("residual")
    return support(
        unknown(args, ("x", "weight", "eps", "offset", "cast_first", "residual")),
        dtypes(args, ("x", "weight"), FLOATS),
        same_dtype(args, ("x", "residual")),
        one_device(args),
        f"a residual of shape {list(residual.shape)}" if residual is not None and residual.shape != x.shape else "",
        f"a weight of shape {list(weight.shape)}" if weight is not None and weight.shape != x.shape[-1:] else "",
    )


KERNEL = Kernel(
    op="rms_norm",
    technique="torch",
    summary="torch.nn.functional.rms_norm, on any device",
    run=run,
    requires=Requires(dtypes=FLOATS),
    supports=supports,
)
