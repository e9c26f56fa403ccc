"""Causal grouped attention over a paged cache: prefill, chunks after a cache, decode, ragged batches of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op
from dz.ops import attention
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_q: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[T, H, D] in q's dtype. q [T, H, D] holds the queries of all sequences, sequence b's at cu_q[b] : cu_q[b + 1]:
    they are the last of its kv_lengths[b] positions. Position j of sequence b is row j % page of block
    block_table[b, j // page] in the caches [blocks, page, Hk, D]; head h reads key head h // (H / Hk).

    block_table [B, P], kv_lengths [B] and cu_q [B + 1] are int32. `window`, `sinks` [H] fp32 and `softcap` as in
    dz.ops.attention. Blocks past a sequence's length are not read."""
    page, out = k_cache.shape[1], torch.zeros_like(q)
    for b in range(block_table.shape[0]):
        first, last, length = int(cu_q[b]), int(cu_q[b + 1]), int(kv_lengths[b])
        if first == last or not length:
            continue
        blocks = block_table[b, : -(-length // page)].long()
        k, v = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (k_cache, v_cache))
        queries = q[first:last].transpose(0, 1)[None]
        out[first:last] = attention.reference(
            queries, k, v, scale=scale, window=window, sinks=sinks, softcap=softcap
        )[0]  # fmt: skip
    return out


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: decode, prefill, chunks and a mixture, ragged and empty sequences, shuffled blocks with poison in what is
    not theirs, windows, sinks, softcaps, groups of 1 to 16 heads, head sizes 64 to 256, views."""
    m = Maker(dtype, device, seed)

    def case(
        name: str, lengths: list[int], queries: list[int], heads: int, key_heads: int, dim: int, page: int
    ) -> Case:
        deep = max(1, max(-(-n // page) for n in lengths))
        order = torch.randperm(len(lengths) * deep + 2, generator=m.generator)
        table = order[: len(lengths) * deep].view(len(lengths), deep).to(torch.int32)
        k = m.normal(len(order), page, key_heads, dim)
        v = m.normal(len(order), page, key_heads, dim, shift=0.3)
        for b, n in enumerate(lengths):  # rows past the end of a sequence, and blocks of nobody
            rows = torch.arange(deep * page)
            past = rows >= n
            k[table[b].long()[rows[past] // page], rows[past] % page] = float("nan")
            v[table[b].long()[rows[past] // page], rows[past] % page] = float("nan")
        ends = torch.tensor([0, *queries]).cumsum(0).tolist()
        args = {
            "q": m.normal(sum(queries), heads, dim),
            "k_cache": k,
            "v_cache": v,
            "block_table": table.to(device),
            "kv_lengths": m.tensor(lengths, "int32"),
            "cu_q": m.tensor(ends, "int32"),
            "scale": dim**-0.5,
        }
        return Case(name, args)

    sinks = m.normal(8, dtype="float32")
    yield case("decode_b3_h8_kv2_d64", [70, 1, 130], [1, 1, 1], 8, 2, 64, 16)
    yield case("decode_b2_h16_kv1_d128_page64", [100, 63], [1, 1], 16, 1, 128, 64)
    yield case("decode_b2_h2_kv2_d256", [40, 33], [1, 1], 2, 2, 256, 16)
    yield case("prefill_b2_h2_kv1_d64", [20, 9], [20, 9], 2, 1, 64, 16)
    yield case("prefill_b1_h1_kv1_d128_page64", [66], [66], 1, 1, 128, 64)
    mixed = case("mixed_b4_h8_kv2_d64", [50, 0, 5, 75], [1, 0, 5, 2], 8, 2, 64, 16)
    yield mixed
    yield Case("mixed_window_sinks", {**mixed.args, "window": 9, "sinks": sinks})
    yield Case("mixed_softcap", {**mixed.args, "softcap": 3.0})
    one = case("decode_b2_h8_window_sinks", [100, 5], [1, 1], 8, 1, 64, 16)
    yield Case(one.id, {**one.args, "window": 20, "sinks": sinks})
    yield case("none_b1", [7], [0], 4, 2, 64, 16)
    wide = case("decode_b2_views", [60, 90], [1, 1], 8, 4, 128, 16)
    views = {name: wide.args[name][..., ::2] for name in ("k_cache", "v_cache")}
    yield Case(wide.id, {**wide.args, **views, "q": wide.args["q"][..., :64]})


OP = Op(
    name="paged_attention",
    summary="causal grouped attention over a paged cache, ragged",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    kind="function",
    source="paged attention over a block table",
)
