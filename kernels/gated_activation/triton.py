"""Gated activations in one pass over two strided views, so that halves and interleaved columns are read in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two, rows
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, same_dtype, support, unknown
from dz.ops.gated_activation import split

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "situ")
ARGUMENTS = ("gate", "up", "activation", "interleaved", "alpha", "limit", "shift", "gate_cap", "up_cap")
COLS = 1024


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    # exp of a negative number never overflows; tl has no tanh that the interpreter knows
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _activate(g, alpha, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = g * _sigmoid(alpha * g)
    elif ACTIVATION == "gelu":
        y = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = 0.5 * g * (1.0 + _tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)))
    elif ACTIVATION == "relu":
        y = tl.where(g < 0, 0.0, g)
    elif ACTIVATION == "relu2":
        y = tl.where(g < 0, 0.0, g * g)
    else:
        tl.static_assert(ACTIVATION == "sigmoid")
        y = _sigmoid(g)
    return y


@triton.jit
def _kernel(
    gate, up, out,
    n_rows, width, g_row, g_col, u_row, u_col, alpha, limit, shift, gate_cap, up_cap,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    col = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :].to(tl.int64)
    inside = (row < n_rows) & (col < width)
    g = tl.load(gate + row * g_row + col * g_col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * u_row + col * u_col, mask=inside, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        # where, not minimum and maximum: those drop a NaN
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    if ACTIVATION == "situ":
        y = gate_cap * _tanh(g / gate_cap) * _sigmoid(g) * (up_cap * _tanh(u / up_cap) + shift)
    else:
        y = _activate(g, alpha, ACTIVATION) * (u + shift)
    tl.store(out + row * width + col, y.to(out.dtype.element_ty), mask=inside)


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
    """See dz.ops.gated_activation.reference."""
    g, u = split(gate, up, interleaved)
    out = torch.empty(g.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        g, u = rows(g), rows(u)
        n_rows, width = g.shape
        cols = min(COLS, power_of_two(width, 16))
        tile = max(1, min(COLS // cols, power_of_two(n_rows)))
        with on(gate):
            _kernel[(triton.cdiv(n_rows, tile), triton.cdiv(width, cols))](
                g, u, out,
                n_rows, width, g.stride(0), g.stride(1), u.stride(0), u.stride(1),
                alpha, limit or 0.0, shift, gate_cap, up_cap,
                ACTIVATION=activation, HAS_LIMIT=limit is not None, ROWS=tile, COLS=cols, num_warps=4,
            )  # fmt: skip
    return out


def supports(args: Mapping[str, Any]) -> Support:
    """Every argument of the op; gate and up of one shape and dtype, alpha for silu only."""
    gate, up, name = args["gate"], args.get("up"), args.get("activation", "silu")
    return support(
        unknown(args, ARGUMENTS),
        dtypes(args, ("gate", "up"), FLOATS),
        same_dtype(args, ("gate", "up")),
        one_device(args),
        f"the activation {name}" if name not in ACTIVATIONS else "",
        f"alpha for {name}" if name != "silu" and args.get("alpha", 1.0) != 1.0 else "",
        f"an up of shape {list(up.shape)}" if up is not None and up.shape != gate.shape else "",
        "interleaved columns of two tensors" if up is not None and args.get("interleaved") else "",
        "an odd number of columns for gate and up" if up is None and gate.shape[-1] % 2 else "",
    )


KERNEL = Kernel(
    op="gated_activation",
    technique="triton",
    summary="one pass over strided views, every activation and clamp",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=FLOATS),
    supports=supports,
)
