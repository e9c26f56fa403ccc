"""The delta rule in chunks of 64 tokens by matrix products: what each chunk is by itself, for the walk in delta_scan.

Every decay between two tokens of a chunk is a product of factors <= 1, whatever the gate: at level b = 1, 2, .. 32 the
pairs (i, j) with i in an odd block of b tokens and j in the block before it meet at the border between them,
`exp(G_i - G_j) = exp(G_i - G_border) exp(G_border - G_j)`. Where the gate is bounded, pairs within 16 tokens go through
their middle instead (NARROW). The inverse X of the unit triangle I + A grows by the same levels: X <- X - X A_b X.
Sums of log decays are products with matrices of 0 and +-1, log decays rounded to fp16 (11 bits).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.kernels.common.delta import log_decay
from dz.kernels.common.delta_scan import Lengths, Tiles, scan, sequence_of, span
from dz.kernels.common.delta_steps import scattered
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import FLOATS, dtypes, one_device

WIDEST, STEEPEST = 128, -10.0  # exp(8 * 10) is finite in fp32
CONFIG = {
    "chunk_warps": 4, "rows": 128, "warps": 8, "stages": 3, "own_rows": 128, "own_warps": 8, "own_stages": 3,
}  # fmt: skip


@triton.jit
def _sums(select, logs):
    """fp32 sums of the log decays that each row of a matrix of 0 and +-1 selects."""
    return tl.dot(select.to(tl.float16), logs)


@triton.jit
def _under(rows, length, decay):
    """Rows over their length, under a decay, rounded once."""
    return (rows.to(tl.float32) * (length[:, None] * decay)).to(tl.bfloat16)


@triton.jit
def chunks(
    q, k, v, g, beta, a_log, dt_bias, cu, w, u, q_out, k_out, inner, decay,
    sequences, tokens, heads, group, dim, dim_v, scale, lower, zero,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, g_d, b_b, b_t, b_h,
    K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BOUNDED: tl.constexpr, NARROW: tl.constexpr, LOGITS: tl.constexpr, NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """One chunk and head: its tiles, see delta_scan.Tiles."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = sequence_of(chunk, cu, sequences, tokens, PACKED, MANY)
    if row >= sequences:
        return
    first, last, base = span(row, cu, sequences, tokens, PACKED, MANY)
    first += (chunk - base) * 64
    batch = tl.cast(0 if PACKED else row, tl.int64)
    tile = tl.cast(chunk, tl.int64) * heads + head
    i, j, c, e = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :], tl.arange(0, PART)[None, :], tl.arange(0, V)
    t = tl.cast(first, tl.int64) + i
    live = t < last
    at_k = k + batch * k_b + head // group * k_h + t * k_t + c
    at_q = q + batch * q_b + head // group * q_h + t * q_t + c
    at_g = g + batch * g_b + head * g_h + t * g_t + c * g_d
    # Key channels come in parts of PART, so that what is held fits the registers. Nothing happens after the end.
    logs = ()
    keys2, asks2, own = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    for p in tl.static_range(K // PART):
        inside = live & (p * PART + c < dim)
        x = tl.load(at_g + p * PART * g_d, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            if BIAS:
                x += tl.load(dt_bias + head * dim + p * PART + c, mask=p * PART + c < dim, other=0.0).to(tl.float32)
            x = log_decay(x, tl.exp(tl.load(a_log + head).to(tl.float32)), lower, BOUNDED)
        x = tl.where(inside, tl.maximum(x, -60000.0), 0.0).to(tl.float16)
        logs = logs + (x,)
        tl.store(decay + tile * K + p * PART + tl.arange(0, PART), tl.exp(tl.sum(x.to(tl.float32), 0)))
        key = tl.load(at_k + p * PART, mask=inside, other=0.0).to(tl.float32)
        ask = tl.load(at_q + p * PART, mask=inside, other=0.0).to(tl.float32)
        keys2, asks2, own = keys2 + tl.sum(key * key, 1), asks2 + tl.sum(ask * ask, 1), own + tl.sum(ask * key, 1)
    when = tl.cast(first, tl.int64) + tl.arange(0, 64)
    weight = tl.load(beta + batch * b_b + head * b_h + when * b_t, mask=when < last, other=0.0).to(tl.float32)
    if LOGITS:
        weight = tl.where(when < last, tl.sigmoid(weight), 0.0)
    long, ask_long = tl.full((64,), 1.0, tl.float32), tl.full((64,), 1.0, tl.float32) * scale
    if NORMALIZE:
        long, ask_long = 1.0 / tl.sqrt_rn(keys2 + 1e-6), scale / tl.sqrt_rn(asks2 + 1e-6)
    reads = tl.where(i == j, (own * long * ask_long)[:, None], 0.0)
    x = tl.where(i == j, 1.0, 0.0)
    if NARROW:  # within 16 tokens the decays to and from the middle fit fp32: no levels below it
        middle = i // 16 * 16 + 7
        select = ((j > middle) & (j <= i)).to(tl.float32) - ((j > i) & (j <= middle)).to(tl.float32)
        a, read = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
        for p in tl.static_range(K // PART):
            d = _sums(select, logs[p])
            inside = live & (p * PART + c < dim)
            keys = tl.load(at_k + p * PART, mask=inside, other=0.0)
            right = tl.trans(_under(keys, long, tl.exp(-d)))
            d = tl.exp(d)
            a = tl.dot(_under(keys, long, d), right, a)
            read = tl.dot(_under(tl.load(at_q + p * PART, mask=inside, other=0.0), ask_long, d), right, read)
        near = (i // 16 == j // 16) & (j < i)
        a = tl.where(near, a, 0.0) * weight[:, None]
        reads = tl.where(near, read, reads)
        for level in range(zero, zero + 4):
            x = _grow(x, tl.where(((i >> level) % 2 == 1) & ((i >> level) - 1 == (j >> level)), a, 0.0))
    for level in range(zero + (4 if NARROW else 0), zero + 6):  # not unrolled: two levels at once would not fit
        block = i >> level
        odd, begin = block % 2 == 1, block << level
        select = tl.where(odd, (j >= begin) & (j <= i), (j > i) & (j < begin + (1 << level))).to(tl.float32)
        a, read = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
        for p in tl.static_range(K // PART):
            far = tl.exp(_sums(select, logs[p]))
            inside = live & (p * PART + c < dim)
            left = _under(tl.load(at_k + p * PART + level * zero, mask=inside, other=0.0), long, far)
            right = tl.trans(left)
            a = tl.dot(left, right, a)
            asks = tl.load(at_q + p * PART + level * zero, mask=inside, other=0.0)
            read = tl.dot(_under(asks, ask_long, far), right, read)
        near = odd & ((j >> level) == block - 1)
        reads = tl.where(near, read, reads)
        x = _grow(x, tl.where(near, a, 0.0) * weight[:, None])
    tl.store(inner + tile * 4096 + i * 64 + j, reads.to(tl.bfloat16))
    x = (x * weight[None, :]).to(tl.bfloat16)
    for p in tl.static_range(K // PART):
        inside = live & (p * PART + c < dim)
        at = tile * (64 * K) + i * K + p * PART + c
        keys = tl.load(at_k + p * PART, mask=inside, other=0.0)
        tl.store(k_out + at, _under(keys, long, tl.exp(_sums((j > i).to(tl.float32), logs[p]))))
        d = tl.exp(_sums((j <= i).to(tl.float32), logs[p]))
        tl.store(q_out + at, _under(tl.load(at_q + p * PART, mask=inside, other=0.0), ask_long, d))
        tl.store(w + at, tl.dot(x, _under(keys, long, d)).to(tl.bfloat16))
    value = tl.load(v + batch * v_b + head * v_h + t * v_t + e[None, :], mask=live & (e[None, :] < dim_v), other=0.0)
    made = tl.dot(tl.trans(value.to(tl.bfloat16)), tl.trans(x))
    tl.store(u + tile * (64 * V) + e[:, None] * 64 + j, made.to(tl.bfloat16))


@triton.jit
def _grow(x, a):
    """The inverse of a triangle from those of its diagonal blocks and the blocks between them."""
    return x - tl.dot(tl.dot(x, a, input_precision="tf32"), x, input_precision="tf32")


def prompt(
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
    """See dz.ops.kda.reference; g [B, T, H, K] may be a broadcast view. `cfg`: see CONFIG and `scan`. The new state has
    the strides of the given one."""
    batch, tokens, heads, dim_v = v.shape
    dim, lengths = k.shape[-1], Lengths(batch=batch, tokens=tokens, cu=cu_seqlens)
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    new = None
    if return_state:
        new = torch.empty((lengths.sequences, heads, dim, dim_v), dtype=torch.float32, device=q.device)
        new = new if state is None else torch.empty_like(state)
    if lengths.sequences and heads and (tokens or return_state):
        K, V = power_of_two(dim, 16), power_of_two(dim_v, 16)
        tiles = Tiles.empty(lengths.chunks, heads, K, V, q.device)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if lengths.chunks:
            with on(q):
                chunks[(lengths.chunks, heads)](
                    q, k, v, g, beta, a_log, dt_bias, cu_seqlens, tiles.w, tiles.u, tiles.q, tiles.k, tiles.inner,
                    tiles.decay, lengths.sequences, tokens, heads, heads // k.shape[2], dim, dim_v,
                    dim**-0.5 if scale is None else scale, lower_bound or 0.0, 0,
                    *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride(),
                    *beta.stride(), K=K, V=V, PART=min(K, 64), GATED=a_log is not None,
                    BIAS=a_log is not None and dt_bias is not None,
                    BOUNDED=lower_bound is not None,
                    NARROW=a_log is not None and lower_bound is not None and STEEPEST <= lower_bound <= 0,
                    LOGITS=beta_logits, NORMALIZE=normalize, PACKED=cu_seqlens is not None,
                    MANY=power_of_two(lengths.sequences + 1), num_warps=cfg["chunk_warps"], num_stages=1,
                )  # fmt: skip
        scan(tiles, lengths, state, out, new, dim, cfg)
    return out, new


def refusals(args: Mapping[str, Any]) -> tuple[str, ...]:
    """What `prompt` does not take: other dtypes than bfloat16, heads of more than 128 channels, a state not fp32."""
    widest = max(args["k"].shape[-1], args["v"].shape[-1])
    return (
        dtypes(args, ("q", "k", "v"), ("bfloat16",)),
        dtypes(args, ("g", "beta", "a_log", "dt_bias"), FLOATS),
        dtypes(args, ("state",), ("float32",)),
        one_device(args),
        f"heads of {widest}; holds at most {WIDEST}" if widest > WIDEST else "",
        scattered(args),
    )
