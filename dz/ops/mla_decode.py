"""Absorbed latent attention of one query a sequence over its paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op
from dz.ops import sparse_mla
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION


def reference(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    value_dim: int = 512,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, R], lse [B, H] fp32) of q [B, H, D], one query a sequence, over all lengths[b] rows of its sequence.

    Row j of sequence b is row j % page of block block_table[b, j // page] in cache [blocks, page, D], or packed as
    uint8 (dz.ops.latent_fp8). block_table [B, P] and lengths [B] are int32; blocks past a length are not read. Scale,
    value_dim, sink and the results are those of dz.ops.sparse_mla."""
    page, most = cache.shape[1], block_table.shape[1] * cache.shape[1]
    at = torch.arange(most, device=q.device)
    rows = block_table.long()[:, at // page] * page + at % page if most else block_table.long()
    chosen = torch.where(at < lengths[:, None], rows, -1).to(torch.int32)
    return sparse_mla.reference(q, cache.flatten(0, 1), chosen, scale=scale, value_dim=value_dim, sink=sink)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: 12 to 128 heads, pages of 16 and 64, both caches, sinks, lengths from 0 over a part of a tile to many,
    shuffled blocks with poison in what is no one's, one sequence, none."""
    m = Maker(dtype, device, seed)

    def case(name: str, lengths: list[int], heads: int, rank: int, rope: int, page: int, packed: bool = False) -> Case:
        deep = max([-(-n // page) for n in lengths], default=1) or 1
        order = torch.randperm(len(lengths) * deep + 1, generator=m.generator).to(torch.int32)
        cache = m.normal(len(order) * page, rank + rope)
        if packed:
            cache = sparse_mla.pack(cache[:, :rank], cache[:, rank:])
        cache = cache.view(len(order), page, -1)
        table = order[:-1].view(len(lengths), deep)
        for b, n in enumerate(lengths):
            past = torch.arange(n, deep * page)
            cache[table[b].long()[past // page], past % page] = 0xFF if packed else float("nan")
        args = {
            "q": m.normal(len(lengths), heads, rank + rope),
            "cache": cache,
            "block_table": table.to(device),
            "lengths": m.tensor(lengths, "int32"),
            "scale": 1.5 * (rank + rope) ** -0.5,
            "value_dim": rank,
        }
        return Case(name, args)

    yield case("b3_h12_d192", [70, 0, 130], 12, 128, 64, 16)
    yield case("b2_h16_page64", [130, 64], 16, 128, 32, 64)
    yield case("b2_h16_packed", [70, 33], 16, 128, 64, 16, True)
    sunk = case("b2_h20_sink", [0, 50], 20, 128, 64, 16)
    yield Case(sunk.id, {**sunk.args, "sink": m.normal(20, dtype="float32")})
    yield case("b1_h1_one_row", [1], 1, 128, 64, 16)
    yield case("b2_h12_r512", [150, 1], 12, 512, 64, 64)
    yield case("b1_h64_r512_packed", [70], 64, 512, 64, 64, True)
    yield case("b0_h16", [], 16, 128, 64, 16)


OP = Op(
    name="mla_decode",
    summary="absorbed latent attention over a paged cache, one query a sequence",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    kind="function",
    source="multi-head latent attention, absorbed form",
    phases=("decode",),
)
