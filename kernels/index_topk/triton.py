"""Exact top-k of each row in one pass over the scores.

1. A strided sample of a row gives a threshold that about k scores, and a margin of four deviations, should pass.
2. Every score that is not below it is appended with its position to a small buffer. Each thread has its own, so that
   no thread waits for another; neighbouring positions go to different threads, so that clusters spread evenly.
3. The exact k-th key among the buffered scores is found by bisection; ties at it are cut by position.
4. A row for which the sample misled (fewer than k passed, or a buffer overflowed) is repaired: it is streamed into one
   buffer that is cut to its exact k best whenever it is full; then the threshold rises to just above the k-th, since an
   equal score at a later position loses. Only adversarial rows cost more than one pass, and every row is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import dtypes, one_device, support, unknown
from dz.kernels.common.tuned import Tunable, processors

LARGEST = 8192
_SPACE = [
    {"unroll": u, "warps": w, "stages": s, "cut_warps": c, "programs": p}
    for u, w, s, c, p in (
        (8, 4, 2, 8, 4),
        (8, 4, 1, 8, 4),
        (8, 4, 3, 4, 4),
        (16, 4, 1, 8, 4),
        (8, 2, 2, 8, 8),
        (4, 8, 2, 16, 2),
        (4, 4, 2, 16, 4),
    )
]
TUNE = Tunable(
    "index_topk/triton",
    {"unroll": 8, "warps": 4, "stages": 3, "sample": 4096, "cut_warps": 4, "programs": 4},
    {"default": _SPACE, "few": _SPACE},
)


@triton.jit
def _key(bits):
    """The order-preserving uint32 of fp32 bits; -0.0 as 0.0, NaN as one value above +inf."""
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    flip = tl.where(bits < 0, -1, -2147483648)
    key = (bits ^ flip).to(tl.uint32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) == 0, tl.full([], 0x80000000, tl.uint32), key)


@triton.jit
def _score(key):
    """The fp32 value of a key, a NaN's key as +inf: a threshold that every NaN still passes."""
    key = tl.minimum(key, tl.full([], 0xFF800000, tl.uint32))
    bits = tl.where(key >= tl.full([], 0x80000000, tl.uint32), key ^ tl.full([], 0x80000000, tl.uint32), ~key)
    return bits.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)


@triton.jit
def _search(key, low, want, slack):
    """The largest key found with between `want` and `want + slack` keys at or above it; with ties, the exact one. At
    least `want` are at or above `low`."""
    high = tl.max(key) + 1
    while high - low > 1:
        mid = low + (high - low) // 2
        n = tl.sum((key >= mid).to(tl.int32))
        enough = n >= want
        done = enough & (n <= want + slack)
        low = tl.where(enough, mid, low)
        high = tl.where(done, mid + 1, tl.where(enough, high, mid))
    return low


@triton.jit
def _ties(key, place, kth, k):
    """The place below which an equal of the k-th key is among the k."""
    equal = key == kth
    room = k - tl.sum((key > kth).to(tl.int32))
    low = 0
    high = 2147483647
    if tl.sum(equal.to(tl.int32)) > room:  # the place up to which exactly `room` of the equal ones lie
        while high - low > 1:
            mid = low + (high - low) // 2
            enough = tl.sum((equal & (place < mid)).to(tl.int32)) >= room
            high = tl.where(enough, mid, high)
            low = tl.where(enough, low, mid)
    return high


@triton.jit
def _sample(scores, starts, ends, thresholds, k, score_stride, enough, SAMPLE: tl.constexpr, RUN: tl.constexpr):
    i = tl.program_id(0)
    start = tl.load(starts + i)
    end = tl.load(ends + i)
    threshold = float("-inf")
    if end - start > enough:
        row = scores + i.to(tl.int64) * score_stride
        at = tl.arange(0, SAMPLE)
        stride = (end - start) // (SAMPLE // RUN)
        inside = at % RUN < stride
        bits = tl.load(row + start + (at // RUN) * stride + at % RUN, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        key = tl.where(inside, _key(bits), 0)
        share = tl.sum(inside.to(tl.int32), 0) * (k * 1.0 / (end - start).to(tl.float32))
        want = (share + 4.0 * tl.sqrt(share) + 2.0).to(tl.int32)
        threshold = _score(_search(key, tl.full([], 0, tl.uint32), want, want // 8))
    tl.store(thresholds + i, threshold)


@triton.jit
def _keep(x, at, inside, filled, home, threshold, LANES: tl.constexpr, ROOM: tl.constexpr):
    """Append what passes; `filled` is where each thread's next entry goes: lane + LANES * (entries so far)."""
    take = inside & ((x < threshold) == 0)
    entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | at
    tl.store(home + filled, entry, mask=take & (filled < ROOM * LANES))
    return tl.where(take, filled + LANES, filled)


@triton.jit
def _quads(
    row, base, start, end, filled, home, threshold,
    LANES: tl.constexpr, UNROLL: tl.constexpr, ROOM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """UNROLL times four neighbouring scores for each thread."""
    lane = tl.arange(0, LANES)
    tiles = ()
    for u in tl.static_range(UNROLL):
        at = base + u * (LANES * 4) + lane[:, None] * 4 + tl.arange(0, 4)[None, :]
        if WHOLE:
            tiles = tiles + (tl.load(row + at),)
        else:
            tiles = tiles + (tl.load(row + at, mask=(at >= start) & (at < end), other=0.0),)
    for u in tl.static_range(UNROLL):
        even, odd = tl.split(tl.reshape(tiles[u], [LANES, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        four = (x0, x1, x2, x3)
        for q in tl.static_range(4):
            at = base + (u * (LANES * 4) + q) + lane * 4
            inside = (lane >= 0) if WHOLE else (at >= start) & (at < end)
            filled = _keep(four[q], at, inside, filled, home, threshold, LANES, ROOM)
    return filled


@triton.jit
def _collect(
    scores, starts, ends, thresholds, entries, counts, k, score_stride,
    SPLIT: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, ROOM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every SPLIT-th tile of a row. Entries [row, split, ROOM, LANES]: score bits above, position below."""
    i = tl.program_id(0)
    part = i.to(tl.int64) * SPLIT + tl.program_id(1)
    start = tl.load(starts + i)
    end = tl.load(ends + i)
    threshold = tl.load(thresholds + i)
    row = scores + i.to(tl.int64) * score_stride
    lane = tl.arange(0, LANES)
    home = entries + part * (ROOM * LANES)
    filled = lane
    if end - start > k:
        step: tl.constexpr = LANES * UNROLL * 4
        origin = start // 32 * 32
        tiles = (end - origin + step - 1) // step
        first = (origin < start).to(tl.int32)  # tiles that are whole: first to last
        last = (end - origin) // step
        mine = tl.program_id(1)
        for t in tl.range(tl.where(mine < first, mine + SPLIT, mine), last, SPLIT, num_stages=STAGES):
            base = origin + t * step
            filled = _quads(row, base, start, end, filled, home, threshold, LANES, UNROLL, ROOM, True)
        for edge in range(2):
            t = tl.where(edge == 0, 0, last)
            cut = tl.where(edge == 0, first == 1, (last < tiles) & (last >= first))
            if cut & (t % SPLIT == mine):
                base = origin + t * step
                filled = _quads(row, base, start, end, filled, home, threshold, LANES, UNROLL, ROOM, False)
    tl.store(counts + part * LANES + lane, filled // LANES)


@triton.jit
def _finish(
    starts, ends, thresholds, entries, counts, out, flags, k,
    SPLIT: tl.constexpr, LANES: tl.constexpr, ROOM: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    start = tl.load(starts + i)
    length = tl.maximum(tl.load(ends + i) - start, 0)
    line = out + i.to(tl.int64) * k
    bad = 0
    if length <= k:
        o = tl.arange(0, WIDTH)
        tl.store(line + o, tl.where(o < length, start + o, -1), mask=o < k)
    else:
        each: tl.constexpr = SPLIT * ROOM * LANES // THREADS
        at = tl.arange(0, THREADS)[:, None] + tl.arange(0, each)[None, :] * THREADS
        count = tl.load(counts + (i * SPLIT + at // (ROOM * LANES)) * LANES + at % LANES)
        held = at // LANES % ROOM < count
        bad = ((tl.max(count) > ROOM) | (tl.sum(held.to(tl.int32)) < k)).to(tl.int32)
        if bad == 0:
            word = (entries + i.to(tl.int64) * (SPLIT * ROOM * LANES)).to(tl.pointer_type(tl.int32), bitcast=True)
            key = tl.where(held, _key(tl.load(word + 2 * at + 1, mask=held, other=0)), 0)
            kth = _search(key, _key(tl.load(thresholds + i).to(tl.int32, bitcast=True)), k, 0)
            place = tl.load(word + 2 * at, mask=key >= kth, other=0)  # read late: registers
            keep = (key > kth) | ((key == kth) & (place < _ties(key, place, kth, k)))
            flag = keep.to(tl.int32)
            mine = tl.sum(flag, 1)
            rank = (tl.cumsum(mine, 0) - mine)[:, None] + tl.cumsum(flag, 1) - 1
            tl.store(line + rank, place, mask=keep)
    tl.store(flags + i, bad)


@triton.jit
def _cut(values, places, filled, k, CAP: tl.constexpr):
    """Keep the k best of the buffer's `filled` entries, in place and in order; the threshold that later scores need."""
    tl.debug_barrier()
    at = tl.arange(0, CAP)
    x = tl.load(values + at, mask=at < filled, other=0.0)
    place = tl.load(places + at, mask=at < filled, other=0)
    key = tl.where(at < filled, _key(x.to(tl.int32, bitcast=True)), 0)
    kth = _search(key, tl.full([], 0, tl.uint32), k, 0)
    keep = (key > kth) | ((key == kth) & (place < _ties(key, place, kth, k)))
    rank = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(values + rank, x, mask=keep)
    tl.store(places + rank, place, mask=keep)
    tl.debug_barrier()
    return _score(kth + 1)


@triton.jit
def _repair(
    scores, starts, ends, entries, flags, out, k, n_rows, score_stride, entry_stride,
    CAP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    for index in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        i = tl.cast(index, tl.int64)
        if tl.load(flags + i) != 0:
            start = tl.load(starts + i)
            end = tl.load(ends + i)
            row = scores + i * score_stride
            places = (entries + i * entry_stride).to(tl.pointer_type(tl.int32), bitcast=True)
            values = (entries + i * entry_stride + CAP // 2).to(tl.pointer_type(tl.float32), bitcast=True)
            threshold = float("-inf")
            filled = 0
            for base in range(start, end, BLOCK):
                at = base + tl.arange(0, BLOCK)
                x = tl.load(row + at, mask=at < end, other=0.0)
                take = (at < end) & ((x < threshold) == 0)
                flag = take.to(tl.int32)
                count = tl.sum(flag, 0)
                if filled + count > CAP:
                    threshold = _cut(values, places, filled, k, CAP)
                    filled = k
                rank = filled + tl.cumsum(flag, 0) - flag
                tl.store(values + rank, x, mask=take)
                tl.store(places + rank, at, mask=take)
                filled += count
            _cut(values, places, filled, k, CAP)
            o = tl.arange(0, WIDTH)
            tl.store(out + i * k + o, tl.load(places + o, mask=o < k, other=0), mask=o < k)


@triton.jit
def _order(out, k, WIDTH: tl.constexpr):
    o = tl.arange(0, WIDTH)
    line = out + tl.program_id(0).to(tl.int64) * k + o
    place = tl.load(line, mask=o < k, other=-1).to(tl.uint32, bitcast=True)
    tl.store(line, tl.sort(place).to(tl.int32, bitcast=True), mask=o < k)


def run(scores: Tensor, starts: Tensor, ends: Tensor, k: int, *, ordered: bool = True) -> Tensor:
    """See dz.ops.index_topk.reference. Scratch: 32 to 64 k bytes a row."""
    rows = scores.shape[0]
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if not rows:
        return out
    cfg = TUNE.pick(scores.device, "few" if rows <= processors(scores.device) else "default")
    lanes, cap, stride, width = 32 * cfg["warps"], power_of_two(2 * max(k, 32)), scores.stride(0), power_of_two(k)
    split = power_of_two(min(max(processors(scores.device) * cfg["programs"] // rows, 1), 8))
    share = 1.5 * k / (split * lanes)  # what a thread is expected to keep, and room for 5.5 deviations more
    room = power_of_two(int(share + 5.5 * sqrt(share) + 1), 2 * cap // (split * lanes) or 1)
    entries = torch.empty(rows, split * room * lanes, dtype=torch.int64, device=scores.device)
    counts = torch.empty(rows, split * lanes, dtype=torch.int32, device=scores.device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=scores.device)
    flags = torch.empty(rows, dtype=torch.int32, device=scores.device)
    with on(scores):
        _sample[(rows,)](
            scores, starts, ends, thresholds, k, stride, cap,
            SAMPLE=min(cfg["sample"], cap), RUN=min(32, cap // 8), num_warps=8,
        )  # fmt: skip
        _collect[(rows, split)](
            scores, starts, ends, thresholds, entries, counts, k, stride,
            SPLIT=split, LANES=lanes, UNROLL=cfg["unroll"], ROOM=room, STAGES=cfg["stages"], num_warps=cfg["warps"],
        )  # fmt: skip
        _finish[(rows,)](
            starts, ends, thresholds, entries, counts, out, flags, k,
            SPLIT=split, LANES=lanes, ROOM=room, THREADS=min(32 * cfg["cut_warps"], split * room * lanes), WIDTH=width,
            num_warps=cfg["cut_warps"],
        )  # fmt: skip
        _repair[(min(rows, processors(scores.device)),)](
            scores, starts, ends, entries, flags, out, k, rows, stride, entries.stride(0),
            CAP=cap, BLOCK=cap // 2, WIDTH=width, num_warps=16,
        )  # fmt: skip
        if ordered:
            _order[(rows,)](out, k, WIDTH=width, num_warps=8)
    return out


def supports(args: Mapping[str, Any]) -> Support:
    """fp32 rows of stride 1, contiguous int32 windows, k of 1 to 8192."""
    scores, k = args["scores"], args["k"]
    loose = [n for n in ("starts", "ends") if not args[n].is_contiguous()]
    return support(
        unknown(args, ("scores", "starts", "ends", "k", "ordered")),
        dtypes(args, ("scores",), ("float32",)),
        dtypes(args, ("starts", "ends"), ("int32",)),
        one_device(args),
        f"{' and '.join(loose)} with gaps" if loose else "",
        f"rows of stride {scores.stride(-1)}; takes 1" if scores.shape[-1] > 1 and scores.stride(-1) != 1 else "",
        f"k is {k}; takes 1 to {LARGEST}" if not 1 <= k <= LARGEST else "",
    )


KERNEL = Kernel(
    op="index_topk",
    technique="triton",
    summary="sampled threshold, one streaming pass, exact cut by bisection of the order-preserving key",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=("float32",)),
    supports=supports,
)
