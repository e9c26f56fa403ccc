"""The selective scan of mamba 1: a state per channel, decayed by a number per channel, state and token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from dz.core.inventory import Match, SiteView
from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops import _scans
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def _steps(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: x and dt [D, T], a [D, N], b and c [N, T], state [D, N]."""
    out = []
    for t in range(x.shape[-1]):
        state = state * torch.exp(dt[:, t, None] * a) + (dt[:, t] * x[:, t])[:, None] * b[:, t]
        out.append(state @ c[:, t])
    return (torch.stack(out, -1) if out else torch.zeros_like(x)), state


def reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [B, D, T] in x's dtype, new state [B, D, N] in fp32); fp32 inside.

    x and dt [B, D, T], A [D, N] (negative), B and C [B, N, T], D and dt_bias [D]. `step = softplus(dt + dt_bias)`;
    `h[t] = exp(step * A) * h[t-1] + step * x[t] * B[t]`; `y[t] = h[t] C[t] + D * x[t]` (arXiv:2312.00752). `state`
    [B, D, N], zeros if None, is not changed. `cu_seqlens` [S + 1]: a batch of 1 holds S packed sequences, and states
    are [S, D, N]. Raises UsageError for a packed batch of more than one row."""
    if cu_seqlens is not None and x.shape[0] != 1:
        what = f"packed sequences in a batch of {x.shape[0]}"
        raise UsageError(what, "cu_seqlens describes one packed row", "pass [1, D, T]", code="bad_shape")
    sequences = len(cu_seqlens) - 1 if cu_seqlens is not None else x.shape[0]
    step = wide(dt) if dt_bias is None else wide(dt) + wide(dt_bias)[:, None]
    step = F.softplus(step) if dt_softplus else step
    xs, a, b, c = wide(x), wide(A), wide(B), wide(C)
    held = xs.new_zeros(sequences, *A.shape) if state is None else wide(state)
    if cu_seqlens is None:
        rows = [_steps(xs[i], step[i], a, b[i], c[i], held[i]) for i in range(sequences)]
        y = torch.stack([r[0] for r in rows]) if rows else xs
    else:
        spans = [slice(*ends) for ends in pairwise(cu_seqlens.tolist())]
        rows = [_steps(xs[0, :, s], step[0, :, s], a, b[0, :, s], c[0, :, s], held[i]) for i, s in enumerate(spans)]
        y = torch.cat([r[0] for r in rows], -1)[None]
    y = y if D is None else y + wide(D)[:, None] * xs
    return y.to(x.dtype), torch.stack([r[1] for r in rows]) if rows else held


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: skip, bias, a state before, one token, none, packed with an empty sequence, strided."""
    m = Maker(dtype, device, seed)

    def base(b: int, d: int, t: int, n: int) -> dict:
        return {
            "x": m.normal(b, d, t),
            "dt": m.normal(b, d, t),
            "A": -m.normal(d, n, dtype="float32").exp(),
            "B": m.normal(b, n, t, scale=n**-0.5),
            "C": m.normal(b, n, t, scale=n**-0.5),
        }

    skip = {"D": m.normal(6, dtype="float32"), "dt_bias": m.normal(6, dtype="float32")}
    yield Case("t9_d5_n4", base(2, 5, 9, 4))
    yield Case("t33_skip_bias", {**base(1, 6, 33, 8), **skip})
    yield Case("no_softplus", {**base(1, 6, 4, 3), "dt": m.normal(1, 6, 4).abs(), "dt_softplus": False})
    yield Case("decode_with_state", {**base(3, 6, 1, 4), **skip, "state": m.normal(3, 6, 4, dtype="float32")})
    packed = {"cu_seqlens": m.tensor([0, 1, 1, 8]), "state": m.normal(3, 6, 4, dtype="float32")}
    yield Case("packed_1_0_7", {**base(1, 6, 8, 4), **skip, **packed})
    yield Case("no_tokens", {**base(2, 3, 0, 4), "state": m.normal(2, 3, 4, dtype="float32")})
    yield Case("strided", {**base(1, 5, 7, 4), "x": m.normal(1, 7, 5).transpose(1, 2)})


def recognise(site: SiteView) -> Match | None:
    """A function that scans as the op does, whole sequences or one step, proved on random inputs."""
    return _scans.mamba1(site, reference)


OP = Op(
    name="mamba_scan",
    summary="selective scan, one decay per channel, state and token",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    kind="function",
    source="Gu & Dao 2023, arXiv:2312.00752",
)
