"""Tokens in the order of their experts: where each expert's rows begin, which choice each row is, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops.cases import Maker
from dz.ops.precision import EXACT


def reference(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows int32 [T * K], places int32 [T, K], offsets int32 [E + 1]) of the choices index [T, K] (expert ids).

    A choice is numbered `t * K + k`. rows lists the choices by expert, those of one expert in their own order;
    offsets[e] is where expert e begins. An id outside [0, E) is an expert of another rank: its choices follow from
    offsets[E] on, in their own order. places is the position of each choice in rows, -1 for those of other ranks."""
    flat = index.flatten().long()
    group = torch.where((flat >= 0) & (flat < experts), flat, experts)
    rows = torch.sort(group, stable=True).indices
    places = torch.empty_like(rows)
    places[rows] = torch.arange(len(rows), device=index.device)
    places = torch.where(group < experts, places, -1)
    counts = torch.bincount(group, minlength=experts + 1)
    offsets = torch.cat((counts.new_zeros(1), counts[:experts].cumsum(0)))
    return rows.int(), places.view(index.shape).int(), offsets.int()


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: even, one expert with all, ids of other ranks, none here, one token, many choices, many experts, strided,
    none."""
    m = Maker(dtype, device, seed)
    yield Case("t7_k2_e5", {"index": m.ints(0, 5, 7, 2, dtype=dtype), "experts": 5})
    yield Case("all_one_expert", {"index": m.ints(3, 4, 40, 3, dtype=dtype), "experts": 6})
    yield Case("other_ranks", {"index": m.ints(-3, 9, 33, 4, dtype=dtype), "experts": 4})
    yield Case("none_here", {"index": m.ints(8, 20, 5, 4, dtype=dtype), "experts": 8})
    yield Case("one_token_k16_e56", {"index": m.ints(0, 896, 1, 16, dtype=dtype), "experts": 56})
    yield Case("one_choice", {"index": m.ints(0, 1, 1, 1, dtype=dtype), "experts": 1})
    yield Case("t600_k4_e70_long", {"index": m.ints(-1, 72, 600, 4, dtype=dtype), "experts": 70})
    yield Case("t20_e300", {"index": m.ints(0, 300, 20, 8, dtype=dtype), "experts": 300})
    yield Case("strided", {"index": m.ints(0, 6, 9, 8, dtype=dtype)[:, ::2], "experts": 5})
    yield Case("no_tokens", {"index": m.ints(0, 3, 0, 2, dtype=dtype), "experts": 3})


OP = Op(
    name="expert_permute",
    summary="choices sorted by expert: rows, places, offsets",
    reference=reference,
    tolerance={"int32": EXACT, "int64": EXACT},
    inputs=inputs,
    kind="function",
    source="a stable counting sort",
)
