"""The selective scan of mamba 2: a state matrix per head, decayed by one number per head and token."""

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
    """One sequence: x [T, H, P], dt [T, H], a [H], b and c [T, H, N], state [H, P, N]."""
    out = []
    for t in range(x.shape[0]):
        state = state * torch.exp(dt[t] * a)[:, None, None]
        state = state + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        out.append((state * c[t][:, None, :]).sum(-1))
    return (torch.stack(out) if out else torch.zeros_like(x)), state


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
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [B, T, H, P] in x's dtype, new state [B, H, P, N] in fp32); fp32 inside.

    x [B, T, H, P], dt [B, T, H], A [H] (negative), B and C [B, T, G, N], H a multiple of G; D and dt_bias [H].
    `step = clamp(softplus(dt + dt_bias), *dt_limit)`; `S[t] = exp(step * A) * S[t-1] + step * x[t] B[t]^T`;
    `y[t] = S[t] C[t] + D * x[t]` (arXiv:2405.21060). `state` [B, H, P, N], zeros if None, is not changed. `cu_seqlens`
    [N + 1]: a batch of 1 holds N packed sequences, and states are [N, H, P, N]. Raises UsageError for shapes that do
    not fit."""
    heads, groups = x.shape[2], B.shape[2]
    sequences = len(cu_seqlens) - 1 if cu_seqlens is not None else x.shape[0]
    if heads % groups or (cu_seqlens is not None and x.shape[0] != 1):
        what = f"{heads} heads over {groups} groups in a batch of {x.shape[0]}"
        raise UsageError(what, "heads are a multiple of groups, packed rows are one", "check them", code="bad_shape")
    step = wide(dt) if dt_bias is None else wide(dt) + wide(dt_bias)
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    xs, a = wide(x), wide(A)
    b, c = (wide(t).repeat_interleave(heads // groups, 2) for t in (B, C))
    held = xs.new_zeros(sequences, heads, x.shape[3], B.shape[3]) if state is None else wide(state)
    if cu_seqlens is None:
        rows = [_steps(xs[i], step[i], a, b[i], c[i], held[i]) for i in range(sequences)]
        y = torch.stack([r[0] for r in rows]) if rows else xs
    else:
        spans = [slice(*ends) for ends in pairwise(cu_seqlens.tolist())]
        rows = [_steps(xs[0, s], step[0, s], a, b[0, s], c[0, s], held[i]) for i, s in enumerate(spans)]
        y = torch.cat([r[0] for r in rows])[None]
    y = y if D is None else y + wide(D)[:, None] * xs
    return y.to(x.dtype), torch.stack([r[1] for r in rows]) if rows else held


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: groups, skip, bias, limits, a state before, one token, none, packed with an empty sequence, strided."""
    m = Maker(dtype, device, seed)

    def base(b: int, t: int, h: int, p: int, g: int, n: int) -> dict:
        return {
            "x": m.normal(b, t, h, p),
            "dt": m.normal(b, t, h),
            "A": -m.normal(h, dtype="float32").exp(),
            "B": m.normal(b, t, g, n, scale=n**-0.5),
            "C": m.normal(b, t, g, n, scale=n**-0.5),
        }

    skip = {"D": m.normal(4, dtype="float32"), "dt_bias": m.normal(4, dtype="float32")}
    yield Case("t9_h4_g2", base(2, 9, 4, 5, 2, 6))
    yield Case("t33_skip_bias", {**base(1, 33, 4, 6, 1, 8), **skip})
    yield Case("limits", {**base(1, 7, 4, 3, 4, 5), **skip, "dt_limit": (0.1, 0.6)})
    yield Case("no_softplus", {**base(1, 6, 2, 4, 1, 4), "dt_softplus": False, "dt_limit": (0.0, 1.0)})
    yield Case("decode_with_state", {**base(3, 1, 4, 5, 1, 6), **skip, "state": m.normal(3, 4, 5, 6, dtype="float32")})
    packed = {"cu_seqlens": m.tensor([0, 1, 1, 8]), "state": m.normal(3, 4, 5, 6, dtype="float32")}
    yield Case("packed_1_0_7", {**base(1, 8, 4, 5, 2, 6), **skip, **packed})
    yield Case("no_tokens", {**base(2, 0, 2, 3, 1, 4), "state": m.normal(2, 2, 3, 4, dtype="float32")})
    yield Case("strided", {**base(1, 5, 2, 4, 1, 4), "x": m.normal(1, 5, 2, 8)[..., ::2]})


def recognise(site: SiteView) -> Match | None:
    """A function that scans as the op does, whole sequences or one step, proved on random inputs."""
    return _scans.mamba2(site, reference)


OP = Op(
    name="mamba2_scan",
    summary="selective scan, one decay per head and token",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    kind="function",
    source="Dao & Gu 2024, arXiv:2405.21060",
)
