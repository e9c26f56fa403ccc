"""One launch from the projections to the gated output, one program for each sequence and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.delta import delta_step, log_decay, unit_scale
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, same_dtype, support, unknown
from dz.kernels.common.tuned import Tunable

WIDEST = 128
TUNE = Tunable("kda_decode/fused", {"warps": 4}, {"default": [{"warps": w} for w in (4, 8, 16)]})


@triton.jit
def _conv(x, weight, past, new_past, first, at, inside, x_c, w_c, w_w, p_c, p_l, n_c, n_l,
          W: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """SiLU of the convolution at channels first + at, whose new last inputs are stored."""
    channel = first + at
    now = tl.load(x + channel * x_c, mask=inside, other=0.0).to(tl.float32)
    y = now * tl.load(weight + channel * w_c + (W - 1) * w_w, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(L):
        held = tl.load(past + channel * p_c + i * p_l, mask=inside, other=0.0)
        if i + W > L:  # a wider state holds inputs that the convolution no longer sees
            tap = tl.load(weight + channel * w_c + (i + W - 1 - L) * w_w, mask=inside, other=0.0)
            y += held.to(tl.float32) * tap.to(tl.float32)
        if i > 0:
            tl.store(new_past + channel * n_c + (i - 1) * n_l, held, mask=inside)
    tl.store(new_past + channel * n_c + (L - 1) * n_l, now.to(new_past.dtype.element_ty), mask=inside)
    return y * tl.sigmoid(y)


@triton.jit
def _kernel(
    x, weight, past, g, beta, a_log, dt_bias, state, gate, norm, out, new_past, new, heads, dim, dim_v, scale, lower,
    eps, x_b, x_c, w_c, w_w, p_b, p_c, p_l, n_b, n_c, n_l, g_b, g_h, g_d, b_b, b_h, s_b, s_h, s_k, s_v, m_b, m_h, m_k,
    m_v, z_b, z_h, z_d, norm_d,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, L: tl.constexpr, BIAS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    row = tl.cast(tl.program_id(0) // heads, tl.int64)
    channel, column = tl.arange(0, K), tl.arange(0, V)
    k_in, v_in = channel < dim, column < dim_v
    inside = k_in[:, None] & v_in[None, :]
    at = row * s_b + head * s_h + channel[:, None] * s_k + column[None, :] * s_v
    s = tl.load(state + at, mask=inside, other=0.0)  # first of all: it is nearly all that must come from memory
    decay = tl.load(g + row * g_b + head * g_h + channel * g_d, mask=k_in, other=0.0).to(tl.float32)
    if BIAS:
        decay += tl.load(dt_bias + head * dim + channel, mask=k_in, other=0.0).to(tl.float32)
    decay = log_decay(decay, tl.exp(tl.load(a_log + head).to(tl.float32)), lower, BOUNDED)
    w = tl.sigmoid(tl.load(beta + row * b_b + head * b_h).to(tl.float32))
    x, past, new_past = x + row * x_b, past + row * p_b, new_past + row * n_b
    q = _conv(x, weight, past, new_past, head * dim, channel, k_in, x_c, w_c, w_w, p_c, p_l, n_c, n_l, W, L)
    k = _conv(x, weight, past, new_past, (heads + head) * dim, channel, k_in, x_c, w_c, w_w, p_c, p_l, n_c, n_l, W, L)
    v = _conv(x, weight, past, new_past, 2 * heads * dim + head * dim_v, column, v_in, x_c, w_c, w_w, p_c, p_l, n_c,
              n_l, W, L)  # fmt: skip
    q *= unit_scale(q, 0) * scale
    k *= unit_scale(k, 0)
    s, o = delta_step(s * tl.exp(decay)[:, None], q, k, v, w)
    at = row * m_b + head * m_h + channel[:, None] * m_k + column[None, :] * m_v
    tl.store(new + at, s, mask=inside)
    o *= 1.0 / tl.sqrt_rn(tl.sum(tl.where(v_in, o * o, 0.0), 0) / dim_v + eps)
    o *= tl.load(norm + column * norm_d, mask=v_in, other=0.0).to(tl.float32)
    o *= tl.sigmoid(tl.load(gate + row * z_b + head * z_h + column * z_d, mask=v_in, other=0.0).to(tl.float32))
    tl.store(out + (row * heads + head) * dim_v + column, o.to(out.dtype.element_ty), mask=v_in)


def run(
    x: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor | None,
    state: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    *,
    lower_bound: float | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """See dz.ops.kda_decode.reference. The new states have the strides of the given ones."""
    batch, heads, dim = g.shape
    dim_v = gate.shape[-1]
    out = torch.empty((batch, heads, dim_v), dtype=x.dtype, device=x.device)
    new_conv, new = torch.empty_like(conv_state), torch.empty_like(state)
    if out.numel():
        with on(x):
            _kernel[(batch * heads,)](
                x, conv_weight, conv_state, g, beta, a_log, dt_bias, state, gate, norm_weight, out, new_conv, new,
                heads, dim, dim_v, dim**-0.5, lower_bound or 0.0, eps, *x.stride(), *conv_weight.stride(),
                *conv_state.stride(), *new_conv.stride(), *g.stride(), *beta.stride(), *state.stride(), *new.stride(),
                *gate.stride(), norm_weight.stride(0),
                K=power_of_two(dim, 16), V=power_of_two(dim_v, 16), W=conv_weight.shape[-1], L=conv_state.shape[-1],
                BIAS=dt_bias is not None, BOUNDED=lower_bound is not None,
                num_warps=TUNE.pick(x.device)["warps"],
            )  # fmt: skip
    return out, new_conv, new


def supports(args: Mapping[str, Any]) -> Support:
    """Every argument of the op; heads of up to 128 channels, an fp32 state, contiguous a_log and dt_bias."""
    names = ("x", "conv_weight", "conv_state", "g", "beta", "a_log", "dt_bias", "gate", "norm_weight")
    widest = max(args["g"].shape[-1], args["gate"].shape[-1])
    loose = [n for n in ("a_log", "dt_bias") if args.get(n) is not None and not args[n].is_contiguous()]
    return support(
        unknown(args, (*names, "state", "lower_bound", "eps")),
        dtypes(args, names, FLOATS),
        dtypes(args, ("state",), ("float32",)),
        same_dtype(args, ("x", "conv_state")),
        one_device(args),
        f"heads of {widest}; holds at most {WIDEST}" if widest > WIDEST else "",
        f"{loose[0]} is not contiguous" if loose else "",
    )


KERNEL = Kernel(
    op="kda_decode",
    technique="fused",
    summary="conv, gate, norms and the delta rule in one launch, the state in registers",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(70, None), dtypes=FLOATS, phases=("decode",)),
    supports=supports,
)
