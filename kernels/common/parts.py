"""What attention kernels share: the end of an online softmax, and the parts of split keys combined."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dz.kernels.common.launch import power_of_two

HALVES = ("bfloat16", "float16")
LOG2E = 1.4426950408889634


@triton.jit
def finish(acc, best, total, place, head, heads, sink, out, lse, RANK: tl.constexpr, SINK: tl.constexpr):
    """Divide `acc` [HEADS, RANK] by `total` and the sink, and store it and the log-sum-exp; `best` is base 2."""
    some = total > 0
    logs = tl.where(some, best + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    if SINK:
        extra = tl.load(sink + head, mask=head < heads, other=0.0) * 1.4426950408889634
        high = tl.maximum(best, extra)  # a sink far above the scores must not overflow
        shrink = tl.exp2(best - high)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(extra - high)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = place[:, None] * RANK + tl.arange(0, RANK)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(head < heads)[:, None])
    tl.store(lse + place, logs * 0.6931471805599453, mask=head < heads)


@triton.jit
def _combine(
    partial, logs, sink, out, lse, heads, splits,
    RANK: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr, SINK: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One query and head, COLS channels: the parts weighted by their sums, in the order of the splits."""
    query = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    i = tl.arange(0, SPLITS)
    place = (query * splits + i) * heads + head
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    x = tl.load(partial + place[:, None] * RANK + c, mask=(i < splits)[:, None], other=0.0)  # waits for nothing
    part = tl.load(logs + place, mask=i < splits, other=float("-inf"))
    best = tl.max(part, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp2(part - best), 0)
    if LSE and tl.program_id(1) == 0:
        some = total > 0
        whole = tl.where(some, best + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse + query * heads + head, whole * 0.6931471805599453)
    if SINK:
        extra = tl.load(sink + head) * 1.4426950408889634
        high = tl.maximum(best, extra)
        total = total * tl.exp2(best - high) + tl.exp2(extra - high)
        best = high
    weight = tl.exp2(part - best) / tl.where(total > 0, total, 1.0)
    mix = tl.sum(tl.where((part > float("-inf"))[:, None], x, 0.0) * weight[:, None], 0)[None, :]
    tl.store(out + (query * heads + head) * RANK + c, mix.to(out.dtype.element_ty))


def combine(partial: Tensor, logs: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor | None = None) -> None:
    """out [S, H, R] and lse [S, H] (natural) of normalised fp32 parts [S, splits, H, R] and the base-2 logs of their
    sums [S, splits, H]; `sink` [H] takes its share of the weight. A part whose log is -inf counts for
    nothing, whatever it holds."""
    queries, splits, heads, rank = partial.shape
    wide = power_of_two(splits)
    cols = min(rank, max(32, 4096 // wide))
    _combine[(queries * heads, rank // cols)](
        partial, logs, logs if sink is None else sink, out, logs if lse is None else lse, heads, splits,
        RANK=rank, COLS=cols, SPLITS=wide, SINK=sink is not None, LSE=lse is not None, num_warps=4,
    )  # fmt: skip
