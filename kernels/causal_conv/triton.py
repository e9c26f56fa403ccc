"""Tiles of tokens and channels, each input read once from memory; packed sequences without the host knowing lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, same_dtype, support, unknown
from dz.kernels.common.tuned import Tunable

WIDEST = 8
TUNE = Tunable("causal_conv/triton", {"tokens": 32, "channels": 128, "warps": 4})


@triton.jit
def _place(block, cu, sequences, tokens, TOKENS: tl.constexpr, PACKED: tl.constexpr, MANY: tl.constexpr):
    """(sequence, its first token, its end, first token of the block) of a block of tokens."""
    if PACKED:
        i = tl.arange(0, MANY)
        a = tl.load(cu + i, mask=i < sequences, other=0)
        b = tl.load(cu + i + 1, mask=i < sequences, other=0)
        ends = tl.cumsum((b - a + TOKENS - 1) // TOKENS, 0)
        row = tl.sum(((ends <= block) & (i < sequences)).to(tl.int32), 0)
        before = tl.sum(tl.where(i < row, (b - a + TOKENS - 1) // TOKENS, 0), 0)
        first = tl.load(cu + tl.minimum(row, sequences - 1))
        last = tl.load(cu + tl.minimum(row, sequences - 1) + 1)
        return row, first, last, first + (block - before) * TOKENS
    blocks = (tokens + TOKENS - 1) // TOKENS
    return block // blocks, block * 0, tokens, block % blocks * TOKENS


@triton.jit
def _conv(
    x, weight, bias, state, cu, y, sequences, tokens, channels,
    x_b, x_c, x_t, w_c, w_w, s_b, s_c, s_l, y_b, y_c, y_t,
    W: tl.constexpr, L: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BIAS: tl.constexpr,
    STATE: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    row, first, last, begin = _place(tl.program_id(0), cu, sequences, tokens, TOKENS, PACKED, MANY)
    if row >= sequences:
        return
    batch = tl.cast(0 if PACKED else row, tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    t = tl.cast(begin, tl.int64) + tl.arange(0, TOKENS)[:, None]
    c_in = c < channels
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if BIAS:
        total += tl.load(bias + c, mask=c_in, other=0.0).to(tl.float32)
    for i in tl.static_range(W):
        at = t - i
        tap = tl.load(weight + c * w_c + (W - 1 - i) * w_w, mask=c_in, other=0.0).to(tl.float32)
        v = tl.load(x + batch * x_b + c * x_c + at * x_t, mask=c_in & (at >= first) & (at < last), other=0.0)
        v = v.to(tl.float32)
        if STATE and i > 0:
            held = state + tl.cast(row, tl.int64) * s_b + c * s_c + (L + at - first) * s_l
            v += tl.load(held, mask=c_in & (at < first) & (at - first >= -L), other=0.0).to(tl.float32)
        total += v * tap
    if SILU:
        total *= tl.sigmoid(total)
    to = y + batch * y_b + c * y_c + t * y_t
    tl.store(to, total.to(y.dtype.element_ty), mask=c_in & (t < last))


@triton.jit
def _keep(
    x, state, cu, new, tokens, channels, x_b, x_c, x_t, s_b, s_c, s_l, n_b, n_c, n_l,
    L: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0), tl.int64)
    first, last, batch = tl.cast(0, tl.int64), tl.cast(tokens, tl.int64), row
    if PACKED:
        first, last = tl.cast(tl.load(cu + row), tl.int64), tl.cast(tl.load(cu + row + 1), tl.int64)
        batch = row * 0
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    inside = (c < channels) & (slot < L)
    at = last - L + slot
    v = tl.load(x + batch * x_b + c * x_c + at * x_t, mask=inside & (at >= first), other=0.0).to(new.dtype.element_ty)
    if STATE:
        held = state + row * s_b + c * s_c + (L + at - first) * s_l
        old = tl.load(held, mask=inside & (at < first), other=0.0).to(new.dtype.element_ty)
        v = tl.where(at < first, old, v)
    tl.store(new + row * n_b + c * n_c + slot * n_l, v, mask=inside)


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See dz.ops.causal_conv.reference. y and the new state have the strides of x and of the given state."""
    (batch, channels, tokens), width = x.shape, weight.shape[-1]
    n = batch if cu_seqlens is None else len(cu_seqlens) - 1
    kept = width - 1 if state is None else state.shape[-1]
    y = torch.empty_like(x)
    new = x.new_empty(n, channels, kept) if state is None else torch.empty_like(state)
    cfg = TUNE.pick(x.device)
    length, tile = (min(cfg["tokens"], power_of_two(tokens)), min(cfg["channels"], power_of_two(channels)))
    blocks = n * triton.cdiv(tokens, length) if cu_seqlens is None else tokens // length + n
    packed, held = cu_seqlens is not None, new if state is None else state
    with on(x):
        if y.numel():
            _conv[(blocks, triton.cdiv(channels, tile))](
                x, weight, bias, held, cu_seqlens, y, n, tokens, channels, *x.stride(), *weight.stride(),
                *held.stride(), *y.stride(), W=width, L=kept, TOKENS=length, CHANNELS=tile, BIAS=bias is not None,
                STATE=state is not None, SILU=activation is not None, PACKED=packed, MANY=power_of_two(n),
                num_warps=cfg["warps"],
            )  # fmt: skip
        if new.numel():
            _keep[(n, triton.cdiv(channels, tile))](
                x, held, cu_seqlens, new, tokens, channels, *x.stride(), *held.stride(), *new.stride(), L=kept,
                SLOTS=power_of_two(kept), CHANNELS=tile, STATE=state is not None, PACKED=packed, num_warps=1,
            )  # fmt: skip
    return y, new


def supports(args: Mapping[str, Any]) -> Support:
    """Widths up to 8, SiLU or no activation, contiguous bias and bounds, a state of x's dtype."""
    names, width = ("x", "weight", "bias", "state"), args["weight"].shape[-1]
    kind, state = args.get("activation"), args.get("state")
    n = args["x"].shape[0] if args.get("cu_seqlens") is None else len(args["cu_seqlens"]) - 1
    loose = [n for n in ("bias", "cu_seqlens") if args.get(n) is not None and not args[n].is_contiguous()]
    fits = state is None or (state.shape[0] == n and state.shape[-1] >= width - 1)
    return support(
        unknown(args, (*names, "activation", "cu_seqlens")),
        dtypes(args, names, FLOATS),
        same_dtype(args, ("x", "state")),
        one_device(args),
        f"a width of {width}; takes at most {WIDEST}" if width > WIDEST else "",
        f"activation {kind}; takes silu or none" if kind not in (None, "silu", "swish") else "",
        "" if fits else "a state too short or of other sequences",
        f"{loose[0]} is not contiguous" if loose else "",
    )


KERNEL = Kernel(
    op="causal_conv",
    technique="triton",
    summary="tiles of tokens and channels in one pass; the new state in a second launch",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(70, None), dtypes=FLOATS),
    supports=supports,
)
