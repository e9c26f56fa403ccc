"""Block selection of a block-sparse attention: the best blocks of keys for each query and index head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dz.core.op import Case, Op
from dz.ops.cases import Maker
from dz.ops.precision import EXACT, wide


def reference(q: Tensor, k: Tensor, positions: Tensor, *, block_size: int = 128, top_k: int = 16) -> Tensor:
    """Block numbers [T, H, top_k] int32, ascending, then -1.

    q [T, H, D], k [S, Hk, D] with head h reading key head h // (H / Hk); positions [T] int32: query t sees keys up to
    positions[t]. A block's score is the largest of q.k over its visible keys, and the query's own block always wins.
    Equal scores: the lowest block. A query that sees fewer blocks than top_k gets them all."""
    queries, heads, _ = q.shape
    keys, key_heads, _ = k.shape
    count = -(-keys // block_size)
    scores = torch.einsum("thd,shd->ths", wide(q), wide(k).repeat_interleave(heads // key_heads, 1))
    seen = torch.arange(keys, device=q.device) <= positions[:, None]
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    padded = torch.nn.functional.pad(scores, (0, count * block_size - keys), value=float("-inf"))
    best = padded.view(queries, heads, count, block_size).amax(-1)
    own = torch.arange(count, device=q.device) == (positions // block_size)[:, None]
    best = best.masked_fill(own[:, None], float("inf"))
    order = torch.sort(best, dim=-1, descending=True, stable=True)
    take = min(top_k, count)
    chosen = torch.where(order.values[..., :take] > float("-inf"), order.indices[..., :take], count).sort(-1).values
    out = torch.full((queries, heads, top_k), -1, dtype=torch.int32, device=q.device)
    out[..., :take] = torch.where(chosen < count, chosen, -1).to(torch.int32)
    return out


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Whole numbers, so that every order of summation gives the same scores and ties are real: shared and own key
    heads, a ragged last block, early queries, fewer blocks than top_k, one query, none."""
    m = Maker(dtype, device, seed)

    def case(name: str, queries: int, heads: int, keys: int, key_heads: int, dim: int, size: int, top: int) -> Case:
        q = m.ints(-3, 4, queries, heads, dim, dtype=dtype)
        k = m.ints(-3, 4, keys, key_heads, dim, dtype=dtype)
        at = torch.sort(m.ints(0, max(keys, 1), queries, dtype="int32")).values.to(torch.int32)
        return Case(name, {"q": q, "k": k, "positions": at, "block_size": size, "top_k": top})

    yield case("t9_h4_s200_shared_d32", 9, 4, 200, 1, 32, 16, 4)
    yield case("t20_h2_s150_own_d16", 20, 2, 150, 2, 16, 16, 3)
    yield case("t5_h4_s40_few_blocks", 5, 4, 40, 2, 16, 16, 8)
    yield case("t1_h1_s513_long", 1, 1, 513, 1, 64, 32, 16)
    yield case("t0_h2_s32", 0, 2, 32, 1, 16, 16, 2)
    late = case("t17_h4_s640_views", 17, 4, 640, 1, 64, 32, 5)
    yield Case(late.id, {**late.args, "q": late.args["q"][..., ::2], "k": late.args["k"][..., 32:]})


OP = Op(
    name="block_select",
    summary="top-k blocks of keys by their best score, the query's own block always among them",
    reference=reference,
    tolerance={"float32": EXACT, "bfloat16": EXACT, "float16": EXACT},
    inputs=inputs,
    kind="function",
    source="block-sparse attention with block maxima as index",
)
