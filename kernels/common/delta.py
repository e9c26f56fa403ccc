"""Device functions that the kernels of the gated delta rule share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_scale(x, axis: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) along an axis of fp32 x."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, axis) + 1e-6)


@triton.jit
def log_decay(x, rate, lower, BOUNDED: tl.constexpr):
    """Log decay of a gate's input (bias added), rate = exp(a_log): see dz.ops.kda.log_decay."""
    if BOUNDED:
        return lower * tl.sigmoid(rate * x)
    return -rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def delta_step(state, q, k, v, beta):
    """(new state, o) of a decayed state [K, V], q and k [K], v [V]: `d = beta (v - k^T S)`, `S += k d^T`, `o = q^T S`.

    Both sums over K are taken of the old state, side by side: `q^T (S + k d^T) = q^T S + (q k) d`."""
    seen = tl.sum(state * k[:, None], 0)
    read = tl.sum(state * q[:, None], 0)
    d = beta * (v - seen)
    return state + k[:, None] * d[None, :], read + tl.sum(q * k, 0) * d
