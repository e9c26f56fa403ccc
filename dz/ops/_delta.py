"""The gated delta rule token by token: what the ops of linear attention with one matrix per head share."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from dz.errors import UsageError
from dz.ops.precision import wide

NORM_EPS = 1e-6  # inside the root of the l2 norm of queries and keys


def unit(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def spans(q: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(row, first token, end) of every sequence of q [B, T, ...]. Raises UsageError for a batch of packed rows."""
    if cu_seqlens is None:
        return [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    if q.shape[0] != 1:
        raise UsageError(
            f"packed sequences in a batch of {q.shape[0]}",
            "cu_seqlens describes one packed row",
            "pass [1, T, H, D]",
            code="bad_shape",
        )
    return [(0, a, b) for a, b in pairwise(cu_seqlens.tolist())]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    normalize: bool,
    scale: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, V] in q's dtype, new state [N, H, K, V] in working precision) of log decays g [B, T, H, K or 1].

    q and k [B, T, Hk, K] serve H / Hk consecutive value heads each. Per token: `S = exp(g) S`, `d = beta (v - k^T S)`,
    `S = S + k d^T`, `o = scale q^T S`. Raises UsageError for a state of another shape."""
    heads = v.shape[2]
    q, k, v, g, beta = (wide(x) for x in (q, k, v, g, beta))
    parts = spans(q, cu_seqlens)
    want = (len(parts), heads, k.shape[-1], v.shape[-1])
    if state is not None and state.shape != want:
        raise UsageError(f"a state of shape {list(state.shape)}", f"{list(want)} is needed", "check the state",
                         code="bad_shape")  # fmt: skip
    q, k = (unit(q), unit(k)) if normalize else (q, k)
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    new = k.new_zeros(want, dtype=v.dtype) if state is None else wide(state).clone()
    out = torch.empty_like(v)
    decay, lengths = g.exp(), [b - a for _, a, b in parts]
    if cu_seqlens is None:  # all sequences at once
        _steps(q, k, v, decay, beta, new, out, slice(None), 0, lengths[0] if lengths else 0)
    else:
        for i, (_, a, b) in enumerate(parts):
            _steps(q, k, v, decay, beta, new, out, slice(i, i + 1), a, b)
    return out, new


def _steps(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, out: Tensor, which: slice, a: int,
    b: int,
) -> None:  # fmt: skip
    state = states[which]
    for t in range(a, b):
        state = state * decay[:, t, :, :, None]
        key = k[:, t, :, None]
        d = (v[:, t, :, None] - key @ state) * beta[:, t, :, None, None]
        state = state + key.transpose(-1, -2) @ d
        out[:, t] = (q[:, t, :, None] @ state)[:, :, 0]
    states[which] = state
