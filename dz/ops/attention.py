"""Softmax attention: grouped heads, causal with offset, window, sinks, softcap, segments, masks, ragged caches."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops._mixing import attention as recognise
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def _segments(cu: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(segment, position in it), both [total], of packed rows with boundaries cu [N + 1]."""
    rows = torch.arange(total, device=cu.device)
    segment = torch.searchsorted(cu[1:].contiguous(), rows, right=True).clamp(max=len(cu) - 2)
    return segment, rows - cu[segment]


def positions(
    q_len: int,
    k_len: int,
    *,
    batch: int,
    device: torch.device,
    q_offset: int | torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions of queries [B, S, 1] and of keys [B, 1, T], and which keys may be looked at before any causality
    [B, S, T]. See `reference` for the arguments."""
    keys = torch.arange(k_len, device=device)
    if (cu_q is None) != (cu_k is None):
        raise UsageError(
            "segments of only one of queries and keys",
            "packed attention needs cu_q and cu_k",
            "give both",
            code="bad_argument",
        )
    if cu_q is not None and cu_k is not None:
        if batch != 1 or q_offset is not None or kv_lengths is not None:
            raise UsageError(
                "segments together with a batch, q_offset or kv_lengths",
                "the segments say all of it",
                "drop the others",
                code="bad_argument",
            )
        if int(cu_q[-1]) != q_len or int(cu_k[-1]) != k_len:
            raise UsageError(
                f"segments of {int(cu_q[-1])} queries and {int(cu_k[-1])} keys",
                f"there are {q_len} and {k_len}",
                "mend the boundaries",
                code="bad_shape",
            )
        seg_q, at_q = _segments(cu_q, q_len)
        seg_k, at_k = _segments(cu_k, k_len)
        shift = (cu_k.diff() - cu_q.diff())[seg_q]
        return (at_q + shift)[None, :, None], at_k[None, None], seg_q[None, :, None] == seg_k[None, None]
    ends = torch.full((batch,), k_len, device=device) if kv_lengths is None else kv_lengths
    offset = ends - q_len if q_offset is None else torch.as_tensor(q_offset, device=device).expand(batch)
    at_q = offset[:, None, None] + torch.arange(q_len, device=device)[None, :, None]
    return at_q, keys[None, None], (keys[None, None] < ends[:, None, None]).expand(batch, q_len, k_len)


def visible(
    at_q: torch.Tensor, at_k: torch.Tensor, allowed: torch.Tensor, *, causal: bool, window: int | None
) -> torch.Tensor:
    """Which keys each query sees [B, S, T]: with a window w, the last w positions, its own included (causal), or fewer
    than w away (not causal)."""
    if causal:
        allowed = allowed & (at_k <= at_q)
    if window is not None:
        near = at_k > at_q - window
        allowed = allowed & (near if causal else near & (at_k < at_q + window))
    return allowed


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int | torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv], H a multiple of G -> [B, S, H, Dv] in q's dtype; fp32 inside.

    Query i of sequence b has position `q_offset + i` (int or [B]; default: the last S positions of the keys); key j has
    position j and exists when j < kv_lengths[b]. `cu_q`, `cu_k` [N + 1]: B = 1 holds N packed sequences, each aligned
    at its end. `mask` broadcasts to [B, H, S, T]: bool (True = look) or added to the scores; it narrows the other
    rules. `softcap * tanh(scores / softcap)` acts before masks; `sinks` [H] are one more logit whose value is nothing.
    `scale` defaults to D^-0.5. A query that sees nothing gives zeros."""
    heads, groups = q.shape[1], k.shape[1]
    if heads % groups:
        raise UsageError(
            f"{heads} query heads over {groups} key heads", "not a multiple", "check the head counts", code="bad_shape"
        )
    batch, _, q_len, dim = q.shape
    at_q, at_k, allowed = positions(
        q_len, k.shape[2], batch=batch, device=q.device, q_offset=q_offset, kv_lengths=kv_lengths, cu_q=cu_q, cu_k=cu_k
    )
    seen = visible(at_q, at_k, allowed, causal=causal, window=window)[:, None]
    kk, vv = (wide(t).repeat_interleave(heads // groups, 1) for t in (k, v))
    scores = wide(q) @ kk.transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    scores = scores.masked_fill(~seen, float("-inf"))
    return _weigh(scores, vv, sinks, seen).transpose(1, 2).to(q.dtype)


def _weigh(scores: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, seen: torch.Tensor) -> torch.Tensor:
    """Softmax over scores [B, H, S, T] and the sinks [H], applied to v [B, H, T, Dv]; rows without weight give zeros.
    Unseen values are cleared first: a cache's unused rows may hold NaN, and 0 * NaN is NaN."""
    column = scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand_as(column)
    logits = torch.cat((scores, column), -1)
    top = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - torch.where(top.isneginf(), 0.0, top))
    total = weights.sum(-1, keepdim=True)
    used = seen.any(-2, keepdim=True).transpose(-1, -2)
    out = weights[..., :-1] @ v.masked_fill(~used, 0.0)
    return torch.where(total > 0, out / total, 0.0)


def _base(m: Maker, b: int, h: int, g: int, s: int, t: int, d: int, dv: int | None = None) -> dict:
    return {"q": m.normal(b, h, s, d), "k": m.normal(b, g, t, d), "v": m.normal(b, g, t, dv or d)}


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: prefill, chunk after a cache, decode, ragged and poisoned caches, packed, each feature and all."""
    m = Maker(dtype, device, seed)
    yield Case("prefill_gqa4x2_s13", _base(m, 2, 4, 2, 13, 13, 16))
    yield Case("not_causal_mqa", {**_base(m, 1, 3, 1, 5, 9, 8), "causal": False})
    yield Case("chunk_s5_after_12", _base(m, 1, 4, 2, 5, 17, 16))
    yield Case("chunk_offset3_of_20", {**_base(m, 1, 4, 4, 6, 20, 16), "q_offset": 3})
    yield Case("dv_differs_scale", {**_base(m, 1, 2, 1, 7, 7, 24, 10), "scale": 0.3})
    ragged = _base(m, 3, 4, 2, 1, 33, 16)
    for name in ("k", "v"):
        for row, end in enumerate((1, 32, 20)):
            ragged[name][row, :, end:] = float("nan")
    yield Case("decode_ragged_poisoned", {**ragged, "kv_lengths": m.tensor([1, 32, 20])})
    yield Case("window4_s11", {**_base(m, 1, 4, 2, 11, 11, 8), "window": 4})
    yield Case("window1", {**_base(m, 1, 2, 2, 5, 8, 8), "window": 1})
    yield Case("window3_not_causal", {**_base(m, 1, 2, 2, 7, 7, 8), "window": 3, "causal": False})
    yield Case("sinks", {**_base(m, 2, 4, 2, 6, 6, 16), "sinks": m.normal(4, scale=2.0)})
    yield Case("softcap2", {**_base(m, 1, 2, 1, 9, 9, 16), "softcap": 2.0, "scale": 1.0})
    bits = m.ints(0, 2, 2, 1, 6, 8).bool()
    bits[0, 0, 2] = False
    yield Case("mask_bool_empty_row", {**_base(m, 2, 2, 1, 6, 8, 8), "mask": bits, "causal": False})
    yield Case("mask_added_per_head", {**_base(m, 1, 3, 3, 5, 5, 8), "mask": m.normal(1, 3, 5, 5)})
    cu = {"cu_q": m.tensor([0, 1, 6, 9]), "cu_k": m.tensor([0, 8, 13, 16])}
    yield Case("packed_1_5_3_of_8_5_3", {**_base(m, 1, 4, 2, 9, 16, 16), **cu})
    every = {"window": 3, "softcap": 3.0, "sinks": m.normal(4), "scale": 0.4, **cu}
    yield Case("packed_window_sinks_softcap", {**_base(m, 1, 4, 2, 9, 16, 16), **every})
    views = {n: t.transpose(1, 2) for n, t in _base(m, 2, 10, 10, 4, 4, 16).items()}
    yield Case("transposed_views_window_sinks", {**views, "window": 6, "sinks": m.normal(4)})
    yield Case("one_token", _base(m, 1, 1, 1, 1, 1, 4))
    yield Case("no_queries", _base(m, 1, 2, 1, 0, 5, 8))
    yield Case("long_t300_decode", _base(m, 2, 8, 2, 1, 300, 32))


OP = Op(
    name="attention",
    summary="softmax attention (GQA, causal offset, window, sinks, softcap, segments, mask)",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    kind="interface",
    source="Vaswani et al. 2017, arXiv:1706.03762; sinks: Xiao et al. 2023, arXiv:2309.17453",
)
