"""The delta rule token by token, its state in registers and the value channels spread over programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.kernels.common.delta import delta_step, log_decay, unit_scale
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, same_dtype

WIDEST = 256
CONFIG = {"columns": 32, "warps": 2}
SPACE = {
    "default": [{"columns": c, "warps": w} for c, w in ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4))]
}
GATE = ("a_log", "dt_bias", "lower_bound", "beta_logits")
GIVEN = ("q", "k", "v", "g", "beta", "normalize", "scale", "state", "cu_seqlens", "return_state")


@triton.jit
def steps(
    q, k, v, g, beta, a_log, dt_bias, cu, state, out, new, tokens, heads, group, dim, dim_v, scale, lower,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, w_b, w_t, w_h, s_b, s_h, s_k, s_v, n_b, n_h, n_k, n_v,
    q_d, k_d, v_d, g_d, blocks,
    K: tl.constexpr, V: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, BOUNDED: tl.constexpr,
    LOGITS: tl.constexpr, NORMALIZE: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One sequence, head and block of value columns, over all its tokens."""
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % heads
    row = tl.cast(tl.program_id(0) // blocks // heads, tl.int64)
    channel = tl.arange(0, K)
    column = block * V + tl.arange(0, V)
    k_in, v_in = channel < dim, column < dim_v
    inside = k_in[:, None] & v_in[None, :]
    s = tl.zeros((K, V), tl.float32)
    if STATE:  # asked for before all else: it is nearly all that must come from memory
        at = row * s_b + head * s_h + channel[:, None] * s_k + column[None, :] * s_v
        s += tl.load(state + at, mask=inside, other=0.0)
    rate, bias = 1.0, tl.zeros((K,), tl.float32)
    if GATED:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    if BIAS:
        bias += tl.load(dt_bias + head * dim + channel, mask=k_in, other=0.0).to(tl.float32)
    first, last, batch = tl.cast(0, tl.int64), tl.cast(tokens, tl.int64), row
    if PACKED:
        first, last = tl.cast(tl.load(cu + row), tl.int64), tl.cast(tl.load(cu + row + 1), tl.int64)
        batch = tl.cast(0, tl.int64)
    at_q = q + batch * q_b + first * q_t + head // group * q_h + channel * q_d
    at_k = k + batch * k_b + first * k_t + head // group * k_h + channel * k_d
    at_v = v + batch * v_b + first * v_t + head * v_h + column * v_d
    at_g = g + batch * g_b + first * g_t + head * g_h + channel * g_d
    at_w = beta + batch * w_b + first * w_t + head * w_h
    to = out + ((batch * tokens + first) * heads + head) * dim_v + column
    for _ in range(first, last):
        query = tl.load(at_q, mask=k_in, other=0.0).to(tl.float32)
        key = tl.load(at_k, mask=k_in, other=0.0).to(tl.float32)
        value = tl.load(at_v, mask=v_in, other=0.0).to(tl.float32)
        decay = tl.load(at_g, mask=k_in, other=0.0).to(tl.float32)
        weight = tl.load(at_w).to(tl.float32)
        if LOGITS:
            weight = tl.sigmoid(weight)
        if GATED:
            decay = log_decay(decay + bias, rate, lower, BOUNDED)
        if NORMALIZE:
            query *= unit_scale(query, 0)
            key *= unit_scale(key, 0)
        s, o = delta_step(s * tl.exp(decay)[:, None], query * scale, key, value, weight)
        tl.store(to, o.to(out.dtype.element_ty), mask=v_in)
        at_q, at_k, at_v, at_g, at_w, to = (
            at_q + q_t,
            at_k + k_t,
            at_v + v_t,
            at_g + g_t,
            at_w + w_t,
            to + heads * dim_v,
        )
    if KEEP:
        at = row * n_b + head * n_h + channel[:, None] * n_k + column[None, :] * n_v
        tl.store(new + at, s, mask=inside)


def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    beta_logits: bool,
    normalize: bool,
    scale: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    return_state: bool,
    cfg: Mapping[str, int],
) -> tuple[Tensor, Tensor | None]:
    """See dz.ops.kda.reference; g [B, T, H, K] may be a broadcast view. `cfg`: value columns of a program, its warps.
    The new state has the strides of the given one."""
    batch, tokens, heads, dim_v = v.shape
    dim, n = k.shape[-1], batch if cu_seqlens is None else len(cu_seqlens) - 1
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    new = torch.empty((n, heads, dim, dim_v), dtype=torch.float32, device=q.device) if state is None else (
        torch.empty_like(state)
    )  # fmt: skip
    columns = min(cfg["columns"], power_of_two(dim_v, 16))
    blocks = triton.cdiv(dim_v, columns)
    held = new if state is None else state
    if n * heads:
        with on(q):
            steps[(n * heads * blocks,)](
                q, k, v, g, beta, a_log, dt_bias, cu_seqlens, held, out, new, tokens, heads, heads // k.shape[2], dim,
                dim_v, dim**-0.5 if scale is None else scale, lower_bound or 0.0, *q.stride()[:3], *k.stride()[:3],
                *v.stride()[:3], *g.stride()[:3], *beta.stride(), *held.stride(), *new.stride(), q.stride(3),
                k.stride(3), v.stride(3), g.stride(3), blocks,
                K=power_of_two(dim, 16), V=columns, GATED=a_log is not None,
                BIAS=a_log is not None and dt_bias is not None, BOUNDED=lower_bound is not None, LOGITS=beta_logits,
                NORMALIZE=normalize, STATE=state is not None, PACKED=cu_seqlens is not None, KEEP=return_state,
                num_warps=cfg["warps"],
            )  # fmt: skip
    return out, new if return_state else None


def refusals(args: Mapping[str, Any]) -> tuple[str, ...]:
    """What `walk` does not take: heads of more than 256 channels, a state that is not fp32, scattered vectors."""
    names = ("q", "k", "v", "g", "beta", "a_log", "dt_bias")
    widest = max(args["k"].shape[-1], args["v"].shape[-1])
    return (
        dtypes(args, names, FLOATS),
        dtypes(args, ("state",), ("float32",)),
        same_dtype(args, ("q", "k", "v")),
        one_device(args),
        f"heads of {widest}; holds at most {WIDEST}" if widest > WIDEST else "",
        scattered(args),
    )


def scattered(args: Mapping[str, Any]) -> str:
    """The first of the small vectors that is not contiguous."""
    loose = [n for n in ("a_log", "dt_bias", "cu_seqlens") if args.get(n) is not None and not args[n].is_contiguous()]
    return f"{loose[0]} is not contiguous" if loose else ""
