"""Multi-head latent attention: keys and values are one shared latent per token, expanded per head or absorbed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops import attention
from dz.ops._mixing import mla as recognise
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def _up(kv_b: torch.Tensor, heads: int, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(key part [H, Dn, R], value part [H, Dv, R]) of the up projection kv_b [H * (Dn + Dv), R]."""
    if kv_b.shape[0] % heads or kv_b.shape[0] // heads <= nope:
        raise UsageError(
            f"an up projection of {kv_b.shape[0]} rows",
            f"{heads} heads of {nope} key channels and some value channels do not fit",
            "check the head counts",
            code="bad_shape",
        )
    per_head = kv_b.view(heads, -1, kv_b.shape[1])
    return per_head[:, :nope], per_head[:, nope:]


def reference(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_b: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int | torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """The expanded form. q_nope [B, H, S, Dn], q_rope [B, H, S, Dr], latent [B, T, R] (normalised), k_rope [B, T, Dr]
    (rotated), kv_b [H * (Dn + Dv), R] -> [B, S, H, Dv]. Dr may be 0.

    `k_h = [kv_b_k[h] latent, k_rope]`, `v_h = kv_b_v[h] latent`, then attention; `scale` defaults to (Dn + Dr)^-0.5,
    that of the expanded head. The other arguments mean what they mean in attention."""
    heads = q_nope.shape[1]
    w_k, w_v = (wide(w) for w in _up(kv_b, heads, q_nope.shape[-1]))
    lat = wide(latent)[:, None]
    rope = wide(k_rope)[:, None].expand(-1, heads, -1, -1)
    out = attention.reference(
        torch.cat((wide(q_nope), wide(q_rope)), -1),
        torch.cat((lat @ w_k.transpose(-1, -2), rope), -1),
        lat @ w_v.transpose(-1, -2),
        scale=scale,
        causal=causal,
        q_offset=q_offset,
        window=window,
        sinks=sinks,
        mask=mask,
        kv_lengths=kv_lengths,
        cu_q=cu_q,
        cu_k=cu_k,
    )
    return out.to(q_nope.dtype)


def absorbed(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_b: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int | torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same function without expanding the cache: queries are carried into the latent space, one shared key head of
    R + Dr channels whose first R are also the value (multi-query attention), and the result is carried out by kv_b_v.
    The scale stays that of the expanded head, not (R + Dr)^-0.5."""
    w_k, w_v = (wide(w) for w in _up(kv_b, q_nope.shape[1], q_nope.shape[-1]))
    mixed = attention.reference(
        torch.cat((wide(q_nope) @ w_k, wide(q_rope)), -1),
        torch.cat((wide(latent), wide(k_rope)), -1)[:, None],
        wide(latent)[:, None],
        scale=(q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5 if scale is None else scale,
        causal=causal,
        q_offset=q_offset,
        window=window,
        sinks=sinks,
        mask=mask,
        kv_lengths=kv_lengths,
        cu_q=cu_q,
        cu_k=cu_k,
    )
    return torch.einsum("bshr,hvr->bshv", mixed, w_v).to(q_nope.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: prefill, chunk, ragged decode over poisoned rows, no rope, packed, sinks, mask, non-power-of-two ranks."""
    m = Maker(dtype, device, seed)

    def base(b: int, h: int, s: int, t: int, *, dn: int = 12, dr: int = 4, dv: int = 10, r: int = 24) -> dict:
        return {
            "q_nope": m.normal(b, h, s, dn),
            "q_rope": m.normal(b, h, s, dr),
            "latent": m.normal(b, t, r),
            "k_rope": m.normal(b, t, dr),
            "kv_b": m.normal(h * (dn + dv), r, scale=r**-0.5),
        }

    yield Case("prefill_h3_s7", base(2, 3, 7, 7))
    yield Case("chunk_s4_after_9", base(1, 6, 4, 13))
    yield Case("no_rope_scale", {**base(1, 3, 5, 5, dr=0), "scale": 0.2})
    ragged = base(3, 4, 1, 21)
    for row, end in enumerate((1, 21, 8)):
        ragged["latent"][row, end:] = float("nan")
        ragged["k_rope"][row, end:] = float("nan")
    yield Case("decode_ragged_poisoned", {**ragged, "kv_lengths": m.tensor([1, 21, 8])})
    packed = {"cu_q": m.tensor([0, 1, 5]), "cu_k": m.tensor([0, 6, 10]), "sinks": m.normal(3)}
    yield Case("packed_sinks", {**base(1, 3, 5, 10), **packed})
    mask = m.ints(0, 2, 1, 1, 4, 6).bool()
    mask[..., 0] = True
    yield Case("mask_not_causal", {**base(1, 2, 4, 6), "mask": mask, "causal": False})
    strided = base(2, 3, 5, 5)
    strided["q_nope"] = m.normal(2, 5, 3, 16).transpose(1, 2)[..., :12]
    yield Case("strided_window2", {**strided, "window": 2})
    yield Case("no_queries", base(1, 2, 0, 3))


OP = Op(
    name="mla",
    summary="multi-head latent attention",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    source="arXiv:2405.04434",
)
