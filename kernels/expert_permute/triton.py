"""A stable counting sort of choices by expert.

Few choices: a choice's place is the number of choices of lower experts, and of earlier ones of its own, counted in one
launch. Many: (1) counts by block of choices, (2) where each block's share of each expert begins, (3) places by rank
within a block. Counts are whole numbers, so the order of the additions does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import dtypes, support, unknown
from dz.kernels.common.tuned import Tunable

MOST, LONGEST = 4096, 1 << 22  # experts; choices
TUNE = Tunable(
    "expert_permute/triton",
    {"few": 2048, "wide": 256, "block": 256},
    {"default": [{"few": f, "wide": w, "block": b} for f in (1024, 2048, 8192) for w, b in ((256, 256), (512, 256))]},
)


@triton.jit
def _group(index, choice, n, k, t_row, t_col, experts):
    """The expert of a choice; `experts` for those of other ranks, one more past the end."""
    row = choice // k
    e = tl.load(index + row.to(tl.int64) * t_row + (choice - row * k) * t_col, mask=choice < n, other=0).to(tl.int64)
    e = tl.where((e >= 0) & (e < experts), e, experts)
    return tl.where(choice < n, e, experts + 1).to(tl.int32)


@triton.jit
def _few(
    index, rows, places, offsets, n, k, t_row, t_col, experts, sorters,
    MINE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The first `sorters` programs place MINE choices each, the others count for MINE offsets each."""
    pid = tl.program_id(0)
    lane = tl.arange(0, MINE)
    sorting = pid < sorters
    mine = pid * MINE + lane
    expert = (pid - sorters) * MINE + lane
    if sorting:
        expert = _group(index, mine, n, k, t_row, t_col, experts)
    order = tl.where(sorting, mine, -1)  # an offset counts no equals
    place = tl.zeros([MINE], tl.int32)
    for base in range(0, n, WIDE):
        other = base + tl.arange(0, WIDE)
        theirs = _group(index, other, n, k, t_row, t_col, experts)[None, :]
        before = (theirs < expert[:, None]) | ((theirs == expert[:, None]) & (other[None, :] < order[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    if sorting:
        tl.store(rows + place, mine, mask=mine < n)
        tl.store(places + mine, tl.where(expert < experts, place, -1), mask=mine < n)
    else:
        tl.store(offsets + expert, place, mask=expert <= experts)


@triton.jit
def _count(
    index, counts, totals, n, k, t_row, t_col, experts, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """counts [blocks, E + 1], and totals over the blocks."""
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.histogram(_group(index, choice, n, k, t_row, t_col, experts), BINS)
    bin = tl.arange(0, BINS)
    tl.store(counts + tl.program_id(0).to(tl.int64) * (experts + 1) + bin, found, mask=bin <= experts)
    tl.atomic_add(totals + bin, found, mask=(bin <= experts) & (found > 0))


@triton.jit
def _begin(counts, totals, offsets, blocks, experts, BLOCKS: tl.constexpr, BINS: tl.constexpr):
    """counts become where each block's share of this program's expert begins."""
    e = tl.program_id(0)
    bin = tl.arange(0, BINS)
    start = tl.sum(tl.load(totals + bin, mask=bin < e, other=0), 0)
    tl.store(offsets + e, start)
    b = tl.arange(0, BLOCKS)
    for base in range(0, blocks, BLOCKS):
        at = counts + (base + b).to(tl.int64) * (experts + 1) + e
        number = tl.load(at, mask=base + b < blocks, other=0)
        tl.store(at, start + tl.cumsum(number, 0) - number, mask=base + b < blocks)
        start += tl.sum(number, 0)


@triton.jit
def _place(
    index, starts, rows, places, n, k, t_row, t_col, experts, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    choice = tl.program_id(0) * BLOCK + lane
    expert = _group(index, choice, n, k, t_row, t_col, experts)
    # once more along the other axis: a load is cheaper than an exchange
    theirs = _group(index, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :], n, k, t_row, t_col, experts)
    earlier = (theirs == expert[:, None]) & (lane[None, :] < lane[:, None])
    start = tl.load(starts + tl.program_id(0).to(tl.int64) * (experts + 1) + expert, mask=choice < n, other=0)
    place = start + tl.sum(earlier.to(tl.int32), 1)
    tl.store(rows + place, choice, mask=choice < n)
    tl.store(places + choice, tl.where(expert < experts, place, -1), mask=choice < n)


def run(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See dz.ops.expert_permute.reference."""
    n, k = index.numel(), index.shape[1]
    rows, places, offsets = (
        torch.empty(size, dtype=torch.int32, device=index.device) for size in ((n,), index.shape, (experts + 1,))
    )
    if not n:
        return rows, places, offsets.zero_()
    cfg = TUNE.pick(index.device)
    mine = 64
    args = (n, k, *index.stride(), experts)
    with on(index):
        if n <= cfg["few"]:
            sorters = triton.cdiv(n, mine)
            _few[(sorters + triton.cdiv(experts + 1, mine),)](
                index, rows, places, offsets, *args, sorters, MINE=mine, WIDE=cfg["wide"]
            )
            return rows, places, offsets
        blocks, bins = triton.cdiv(n, cfg["block"]), power_of_two(experts + 2)
        counts = torch.empty(blocks, experts + 1, dtype=torch.int32, device=index.device)
        totals = torch.zeros(experts + 1, dtype=torch.int32, device=index.device)
        _count[(blocks,)](index, counts, totals, *args, BLOCK=cfg["block"], BINS=bins)
        _begin[(experts + 1,)](
            counts, totals, offsets, blocks, experts, BLOCKS=min(1024, power_of_two(blocks)), BINS=bins
        )
        _place[(blocks,)](index, counts, rows, places, *args, BLOCK=cfg["block"])
    return rows, places, offsets


def supports(args: Mapping[str, Any]) -> Support:
    """Any strides; up to 4096 experts and four million choices."""
    index, experts = args["index"], args["experts"]
    return support(
        unknown(args, ("index", "experts")),
        dtypes(args, ("index",), ("int32", "int64")),
        f"{experts} experts; takes at most {MOST}" if experts > MOST else "",
        f"{index.numel()} choices; takes at most {LONGEST}" if index.numel() > LONGEST else "",
    )


KERNEL = Kernel(
    op="expert_permute",
    technique="triton",
    summary="counting sort: one launch for few choices, three for many",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None)),
    supports=supports,
)
