"""Gated activations by PyTorch's own functions in the storage dtype: two passes instead of the reference's five."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, same_dtype, support, unknown
from dz.ops.gated_activation import split

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}
ARGUMENTS = ("gate", "up", "activation", "interleaved", "alpha", "limit", "shift", "gate_cap", "up_cap")


def run(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    shift: float = 0.0,
    gate_cap: float = 4.0,
    up_cap: float = 25.0,
) -> Tensor:
    """See dz.ops.gated_activation.reference; alpha, gate_cap and up_cap are at rest for what `supports` admits."""
    g, u = split(gate, up, interleaved)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    out = ACTIVATIONS[activation](g)
    return out.mul_(u + shift if shift else u)


def supports(args: Mapping[str, Any]) -> Support:
    """The activations that PyTorch has as one function; no slope, no caps; gate and up of one shape and dtype."""
    gate, up, name = args["gate"], args.get("up"), args.get("activation", "silu")
    return support(
        unknown(args, ARGUMENTS),
        dtypes(args, ("gate", "up"), FLOATS),
        same_dtype(args, ("gate", "up")),
        one_device(args),
        f"{name} is not one function of torch" if name not in ACTIVATIONS else "",
        f"a slope of {args['alpha']}" if args.get("alpha", 1.0) != 1.0 else "",
        f"an up of shape {list(up.shape)}" if up is not None and up.shape != gate.shape else "",
        "interleaved columns of two tensors" if up is not None and args.get("interleaved") else "",
        "an odd number of columns for gate and up" if up is None and gate.shape[-1] % 2 else "",
    )


KERNEL = Kernel(
    op="gated_activation",
    technique="torch",
    summary="torch's fused activation, then the product in place, on any device",
    run=run,
    requires=Requires(dtypes=FLOATS),
    supports=supports,
)
