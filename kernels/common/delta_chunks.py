"""The delta rule in chunks of 64 tokens by matrix products: what each chunk is by itself, for the walk in delta_scan.

The decay between two tokens is exp(G_i - G_j), G the running sum of log decays; as exp(G_i) exp(-G_j) it overflows.
A decay bounded at -5 per token (NARROW) is taken through the middle of each half of 32 tokens: at most exp(80), which
fp32 and bf16 hold; from the first half to the second, through the middle of the second. Any other decay is taken
through levels b = 1, 2, .. 32, whose factors are all <= 1: pairs (i, j) with i in an odd block of b tokens and j in the
block before it meet at the border between them, `exp(G_i - G_border) exp(G_border - G_j)`.
The inverse X of the unit triangle I + A grows by the same levels: X <- X - X A_b X.
Sums of log decays are products with matrices of 0 and +-1, log decays rounded to fp16 (11 bits).
"""

# A launch takes more than the function does:
# pyright: reportCallIssue=false, reportArgumentType=false

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

WIDEST, STEEPEST = 128, -5.0  # exp(16 * 5) is finite in fp32
CONFIG = {
    "part": 32, "chunk_warps": 4, "chunk_registers": 255, "rows": 128, "warps": 8, "stages": 3, "own_rows": 128,
    "own_warps": 8, "own_stages": 3,
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
def _logs(at, bias, live, c_in, rate, lower, GATED: tl.constexpr, BIAS: tl.constexpr, BOUNDED: tl.constexpr):
    """Log decays to base 2, zero where nothing is."""
    x = tl.load(at, mask=live & c_in, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            x += tl.load(bias, mask=c_in, other=0.0).to(tl.float32)
        x = log_decay(x, rate, lower, BOUNDED)
    return tl.where(live & c_in, tl.maximum(x * 1.4426950408889634, -60000.0), 0.0).to(tl.float16)


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
    keys2, asks2 = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    if NORMALIZE:
        for p in tl.static_range(K // PART):
            one = tl.load(at_k + p * PART, mask=live & (p * PART + c < dim), other=0.0).to(tl.float32)
            two = tl.load(at_q + p * PART, mask=live & (p * PART + c < dim), other=0.0).to(tl.float32)
            keys2, asks2 = keys2 + tl.sum(one * one, 1), asks2 + tl.sum(two * two, 1)
        keys2, asks2 = tl.rsqrt(keys2 + 1e-6), tl.rsqrt(asks2 + 1e-6) * scale
    else:
        keys2, asks2 = keys2 + 1.0, asks2 + scale
    when = tl.cast(first, tl.int64) + tl.arange(0, 64)
    weight = tl.load(beta + batch * b_b + head * b_h + when * b_t, mask=when < last, other=0.0).to(tl.float32)
    if LOGITS:
        weight = tl.where(when < last, tl.sigmoid(weight), 0.0)
    rate, early = 1.0, i < 32
    if GATED:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = at_g  # not read
    if BIAS:
        bias = dt_bias + head * dim + c
    a, reads = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
    for p in range(zero, zero + K // PART):  # a loop, not unrolled: two parts at once would not fit the registers
        c_in = p * PART + c < dim
        x = _logs(at_g + p * PART * g_d, bias + p * PART, live, c_in, rate, lower, GATED, BIAS, BOUNDED)
        keys = tl.load(at_k + p * PART, mask=live & c_in, other=0.0)
        asks = tl.load(at_q + p * PART, mask=live & c_in, other=0.0)
        at = tile * (64 * K) + i * K + p * PART + c
        tl.store(k_out + at, _under(keys, keys2, tl.exp2(_sums((j > i).to(tl.float32), x))))
        d = tl.exp2(_sums((j <= i).to(tl.float32), x))
        tl.store(q_out + at, _under(asks, asks2, d))
        tl.store(w + at, _under(keys, keys2, d))
        tl.store(decay + tile * K + p * PART + c + 0 * i, d, mask=i == 63)
        if NARROW:  # to and from the middle of a token's half; from the first half also to the middle of the second
            middle, far = i // 32 * 32 + 15, tl.where(early, (j > i) & (j <= 47), (j > i) & (j <= i // 32 * 32 + 15))
            ahead = ((j > middle) & (j <= i)).to(tl.float32)
            d = _sums(ahead - ((j > i) & (j <= middle)).to(tl.float32), x)
            back = tl.trans(_under(keys, keys2, tl.exp2(-d)))
            far = tl.trans(_under(keys, keys2, tl.exp2(_sums(far.to(tl.float32) - tl.where(early, 0.0, ahead), x))))
            d = tl.exp2(d)
            left, ask = _under(keys, keys2, d), _under(asks, asks2, d)
            a = tl.dot(tl.where(early, left, 0.0), back, a)
            reads = tl.dot(tl.where(early, ask, 0.0), back, reads)
            a = tl.dot(tl.where(early, 0.0, left), far, a)
            reads = tl.dot(tl.where(early, 0.0, ask), far, reads)
        else:
            own = tl.sum(asks.to(tl.float32) * keys.to(tl.float32), 1) * keys2 * asks2
            reads += tl.where(i == j, own[:, None], 0.0)
    if NARROW:
        a, reads = tl.where(j < i, a, 0.0), tl.where(j <= i, reads, 0.0)
    else:
        for level in range(zero, zero + 6):
            block = i >> level
            odd, begin = block % 2 == 1, block << level
            select = tl.where(odd, (j >= begin) & (j <= i), (j > i) & (j < begin + (1 << level))).to(tl.float32)
            pair, read = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
            for p in tl.static_range(K // PART):
                c_in, move = p * PART + c < dim, p * PART + level * zero  # loads that depend on the level stay in it
                border = _logs(at_g + move * g_d, bias + move, live, c_in, rate, lower, GATED, BIAS, BOUNDED)
                border = tl.exp2(_sums(select, border))
                key = _under(tl.load(at_k + move, mask=live & c_in, other=0.0), keys2, border)
                ask = _under(tl.load(at_q + move, mask=live & c_in, other=0.0), asks2, border)
                pair = tl.dot(key, tl.trans(key), pair)
                read = tl.dot(ask, tl.trans(key), read)
            near = odd & ((j >> level) == block - 1)
            a, reads = tl.where(near, pair, a), tl.where(near, read, reads)
    tl.store(inner + tile * 4096 + i * 64 + j, reads.to(tl.bfloat16))
    a *= weight[:, None]
    x = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in range(zero + 1, zero + 6):
        x = _grow(x, tl.where(((i >> level) % 2 == 1) & ((i >> level) - 1 == (j >> level)), a, 0.0))
    tl.debug_barrier()  # the keys of w, stored above, are read back
    x = (x * weight[None, :]).to(tl.bfloat16)
    for p in tl.static_range(K // PART):
        at = tile * (64 * K) + i * K + p * PART + c
        tl.store(w + at, tl.dot(x, tl.load(w + at)).to(tl.bfloat16))
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
                    *beta.stride(), K=K, V=V, PART=min(K, cfg["part"]), GATED=a_log is not None,
                    BIAS=a_log is not None and dt_bias is not None,
                    BOUNDED=lower_bound is not None,
                    NARROW=a_log is not None and lower_bound is not None and STEEPEST <= lower_bound <= 0,
                    LOGITS=beta_logits, NORMALIZE=normalize, PACKED=cu_seqlens is not None,
                    MANY=power_of_two(lengths.sequences + 1), num_warps=cfg["chunk_warps"], num_stages=1,
                    maxnreg=cfg["chunk_registers"],
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
