"""Token by token with the state in registers, its rows spread over programs: for decoding."""

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

WIDEST = 256
TUNE = Tunable(
    "mamba2_scan/recurrent",
    {"rows": 32, "warps": 2},
    {"default": [{"rows": r, "warps": w} for r, w in ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4))]},
)


@triton.jit
def _kernel(
    x, dt, a, b, c, d, bias, state, cu, y, new, tokens, heads, group, dim, dim_n, low, high, blocks,
    x_b, x_t, x_h, x_p, t_b, t_t, t_h, b_b, b_t, b_g, b_n, c_b, c_t, c_g, c_n, s_b, s_h, s_p, s_n, n_b, n_h, n_p, n_n,
    P: tl.constexpr, N: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % heads
    row = tl.cast(tl.program_id(0) // blocks // heads, tl.int64)
    p, n = block * P + tl.arange(0, P), tl.arange(0, N)
    p_in, n_in = p < dim, n < dim_n
    inside = p_in[:, None] & n_in[None, :]
    s = tl.zeros((P, N), tl.float32)
    if STATE:  # asked for before all else: it is nearly all that must come from memory
        at = state + row * s_b + head * s_h + p[:, None] * s_p + n[None, :] * s_n
        s += tl.load(at, mask=inside, other=0.0)
    rate, add, skip = tl.load(a + head).to(tl.float32), 0.0, 0.0
    if BIAS:
        add += tl.load(bias + head).to(tl.float32)
    if SKIP:
        skip += tl.load(d + head).to(tl.float32)
    first, last, batch = tl.cast(0, tl.int64), tl.cast(tokens, tl.int64), row
    if PACKED:
        first, last = tl.cast(tl.load(cu + row), tl.int64), tl.cast(tl.load(cu + row + 1), tl.int64)
        batch = row * 0
    at_x = x + batch * x_b + first * x_t + head * x_h + p * x_p
    at_t = dt + batch * t_b + first * t_t + head * t_h
    at_b = b + batch * b_b + first * b_t + head // group * b_g + n * b_n
    at_c = c + batch * c_b + first * c_t + head // group * c_g + n * c_n
    to = y + ((batch * tokens + first) * heads + head) * dim + p
    for _ in range(first, last):
        value = tl.load(at_x, mask=p_in, other=0.0).to(tl.float32)
        step = tl.load(at_t).to(tl.float32) + add
        if SOFTPLUS:
            step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        step = tl.minimum(tl.maximum(step, low), high)
        into = tl.load(at_b, mask=n_in, other=0.0).to(tl.float32)
        out = tl.load(at_c, mask=n_in, other=0.0).to(tl.float32)
        s = s * tl.exp(step * rate) + (step * value)[:, None] * into[None, :]
        tl.store(to, (tl.sum(s * out[None, :], 1) + skip * value).to(y.dtype.element_ty), mask=p_in)
        at_x, at_t, at_b, at_c, to = at_x + x_t, at_t + t_t, at_b + b_t, at_c + c_t, to + heads * dim
    tl.store(new + row * n_b + head * n_h + p[:, None] * n_p + n[None, :] * n_n, s, mask=inside)


def run(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See dz.ops.mamba2_scan.reference. The new state has the strides of the given one."""
    (batch, tokens, heads, dim), dim_n = x.shape, B.shape[3]
    count = batch if cu_seqlens is None else len(cu_seqlens) - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new = torch.empty((count, heads, dim, dim_n), dtype=torch.float32, device=x.device) if state is None else (
        torch.empty_like(state)
    )  # fmt: skip
    cfg = TUNE.pick(x.device)
    rows = min(cfg["rows"], power_of_two(dim))
    blocks, held = triton.cdiv(dim, rows), new if state is None else state
    if new.numel():
        with on(x):
            _kernel[(count * heads * blocks,)](
                x, dt, A, B, C, D, dt_bias, held, cu_seqlens, y, new, tokens, heads, heads // B.shape[2], dim, dim_n,
                float(dt_limit[0]), float(dt_limit[1]), blocks, *x.stride(), *dt.stride(), *B.stride(), *C.stride(),
                *held.stride(), *new.stride(), P=rows, N=power_of_two(dim_n), SKIP=D is not None,
                BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, STATE=state is not None,
                PACKED=cu_seqlens is not None, num_warps=cfg["warps"],
            )  # fmt: skip
    return y, new


def supports(args: Mapping[str, Any]) -> Support:
    """States of up to 256 numbers a row, in fp32; contiguous A, D and dt_bias of one number per head."""
    names, flat = ("x", "dt", "A", "B", "C", "D", "dt_bias"), ("A", "D", "dt_bias", "cu_seqlens")
    width, heads, groups = args["B"].shape[3], args["x"].shape[2], args["B"].shape[2]
    loose = [n for n in flat if (t := args.get(n)) is not None and not (t.dim() == 1 and t.is_contiguous())]
    return support(
        unknown(args, (*names, "dt_softplus", "dt_limit", "state", "cu_seqlens")),
        dtypes(args, names, FLOATS),
        dtypes(args, ("state",), ("float32",)),
        same_dtype(args, ("x", "B", "C")),
        one_device(args),
        f"rows of {width}; holds at most {WIDEST}" if width > WIDEST else "",
        f"{heads} heads over {groups} groups" if heads % groups else "",
        f"{loose[0]} is not a contiguous row" if loose else "",
    )


KERNEL = Kernel(
    op="mamba2_scan",
    technique="recurrent",
    summary="token by token, state in registers",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(70, None), dtypes=FLOATS, phases=("decode", "prefill")),
    supports=supports,
)
