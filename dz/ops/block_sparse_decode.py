"""Attention of one query a sequence over its selected blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op
from dz.ops import block_sparse_attention
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    blocks: Tensor,
    *,
    scale: float,
    block_size: int = 128,
) -> Tensor:
    """[B, H, D]: the query of sequence b is its last position, lengths[b] - 1.

    q [B, H, D]; k_cache, v_cache [N, page, Hk, D]; position j of sequence b is row j % page of the cache's block
    block_table[b, j // page]; block_table [B, P] and lengths [B] int32. blocks [B, Hk, n] int32 names blocks of
    `block_size` positions:
    -1 for none, one named twice counts once, positions past the length do not. Without any there are zeros."""
    page, out = k_cache.shape[1], torch.zeros_like(q)
    for b in range(q.shape[0]):
        length = int(lengths[b])
        used = block_table[b, : -(-length // page)].long()
        if length:
            k, v = (cache[used].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            last = torch.tensor([length - 1], dtype=torch.int32, device=q.device)
            out[b] = block_sparse_attention.reference(
                q[b : b + 1], k, v, blocks[b : b + 1], last, scale=scale, block_size=block_size
            )[0]  # fmt: skip
    return out


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: grouped and single heads, pages smaller than, as large as and larger than blocks, ragged and empty
    sequences, blocks named twice, beyond the length or none, shuffled pages with poison in what is no one's."""
    m = Maker(dtype, device, seed)

    def case(name: str, lengths: list[int], heads: int, key_heads: int, dim: int, page: int, size: int, n: int) -> Case:
        deep = max([-(-x // page) for x in lengths], default=1) or 1
        order = torch.randperm(len(lengths) * deep + 1, generator=m.generator).to(torch.int32)
        table = order[:-1].view(len(lengths), deep)
        k, v = m.normal(len(order), page, key_heads, dim), m.normal(len(order), page, key_heads, dim, shift=0.3)
        for b, length in enumerate(lengths):
            past = torch.arange(length, deep * page)
            k[table[b].long()[past // page], past % page] = float("nan")
            v[table[b].long()[past // page], past % page] = float("nan")
        args = {
            "q": m.normal(len(lengths), heads, dim),
            "k_cache": k,
            "v_cache": v,
            "block_table": table.to(device),
            "lengths": m.tensor(lengths, "int32"),
            "blocks": m.ints(-1, deep * page // size + 1, len(lengths), key_heads, n, dtype="int32"),
            "scale": dim**-0.5,
            "block_size": size,
        }
        return Case(name, args)

    yield case("b3_h8_kv2_d64_small_pages", [100, 0, 37], 8, 2, 64, 16, 32, 4)
    yield case("b2_h16_kv1_d128", [300, 129], 16, 1, 128, 64, 64, 5)
    yield case("b2_h4_kv4_d64_large_pages", [120, 64], 4, 4, 64, 64, 32, 3)
    lonely = case("b2_h8_kv2_no_blocks", [64, 64], 8, 2, 64, 32, 32, 2)
    lonely.args["blocks"][0] = -1
    yield lonely
    yield case("b0_h8", [], 8, 2, 64, 32, 32, 2)


OP = Op(
    name="block_sparse_decode",
    summary="attention of one query a sequence over selected blocks of a paged cache",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    kind="function",
    source="block-sparse attention with per-group block selection",
    phases=("decode",),
)
