"""Index scores: a tile of keys stays put, queries pass by.

Keys are the rows of the product and heads its columns: the sum over heads is a row's sum, mostly within a thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.launch import on, power_of_two
from dz.kernels.common.refuse import FLOATS, dtypes, one_device, same_dtype, support, unknown
from dz.kernels.common.tuned import Tunable

DTYPES = ("float8_e4m3fn", *FLOATS)
TUNE = Tunable(
    "index_scores/triton",
    {"keys": 128, "warps": 4, "stages": 3, "queries": 64},
    {
        "default": [
            {"keys": k, "warps": w, "stages": s, "queries": n}
            for k, w, s, n in (
                (128, 4, 3, 64),
                (256, 8, 3, 64),
                (128, 8, 3, 64),
                (256, 8, 4, 128),
                (128, 4, 4, 128),
                (256, 4, 3, 64),
            )
        ]
    },
)


@triton.jit
def _kernel(
    q, k, weights, k_scale, starts, ends, scores,
    n_queries, n_keys, heads, q_row, q_head, k_row, w_row, w_head,
    HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
    SCALED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    inside = t < n_keys
    d = tl.arange(0, D)
    h = tl.arange(0, HEADS)
    first = tl.program_id(1) * QUERIES
    last = tl.minimum(first + QUERIES, n_queries)
    chunk = first + tl.arange(0, QUERIES)
    low = tl.min(tl.load(starts + chunk, mask=chunk < n_queries, other=2147483647), 0)
    high = tl.max(tl.load(ends + chunk, mask=chunk < n_queries, other=0), 0)
    line = scores + t
    if (tl.program_id(0) * KEYS >= high) | (tl.program_id(0) * KEYS + KEYS <= low):  # nobody here sees these keys
        for i in range(first, last):
            nothing = tl.full([KEYS], float("-inf"), tl.float32)
            tl.store(line + tl.cast(i, tl.int64) * n_keys, nothing, mask=inside)
    else:
        keys = tl.load(k + t.to(tl.int64)[:, None] * k_row + d[None, :], mask=inside[:, None], other=0.0)
        if SCALED:
            scale = tl.load(k_scale + t, mask=inside, other=0.0)
        for i in range(first, last):
            row = tl.cast(i, tl.int64)
            rows = tl.load(q + row * q_row + h[:, None] * q_head + d[None, :], mask=(h < heads)[:, None], other=0.0)
            w = tl.load(weights + row * w_row + h * w_head, mask=h < heads, other=0.0)
            if PRECISE:
                products = tl.dot(keys, tl.trans(rows), input_precision="ieee")
            else:
                products = tl.dot(keys, tl.trans(rows))
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
            s = tl.sum(products * w[None, :], 1)
            if SCALED:
                s *= scale
            seen = (t >= tl.load(starts + i)) & (t < tl.load(ends + i))
            tl.store(line + row * n_keys, tl.where(seen, s, float("-inf")), mask=inside)


def run(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, *, k_scale: Tensor | None = None
) -> Tensor:
    """See dz.ops.index_scores.reference."""
    queries, heads, dim = q.shape
    scores = torch.empty(queries, k.shape[0], dtype=torch.float32, device=q.device)
    if not scores.numel():
        return scores
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cfg = TUNE.pick(q.device)
    chunk = min(cfg["queries"], power_of_two(queries))
    with on(q):
        _kernel[(triton.cdiv(k.shape[0], cfg["keys"]), triton.cdiv(queries, chunk))](
            q, k, weights, weights if k_scale is None else k_scale, starts, ends, scores,
            queries, k.shape[0], heads, q.stride(0), q.stride(1), k.stride(0), *weights.stride(),
            HEADS=power_of_two(heads, 16), D=dim, KEYS=cfg["keys"], QUERIES=chunk,
            SCALED=k_scale is not None, PRECISE=q.dtype == torch.float32,
            num_warps=cfg["warps"], num_stages=cfg["stages"],
        )  # fmt: skip
    return scores


def supports(args: Mapping[str, Any]) -> Support:
    """Head sizes that are powers of two from 16 (e4m3: 32) to 256; up to 128 heads."""
    q, scale = args["q"], args.get("k_scale")
    heads, dim = q.shape[1:]
    odd = dim & (dim - 1)
    least = 32 if q.dtype == torch.float8_e4m3fn else 16
    loose = [n for n in ("starts", "ends", "k_scale") if isinstance(x := args.get(n), Tensor) and not x.is_contiguous()]
    return support(
        unknown(args, ("q", "k", "weights", "starts", "ends", "k_scale")),
        dtypes(args, ("q", "k"), DTYPES),
        dtypes(args, ("weights", "k_scale"), ("float32",)),
        dtypes(args, ("starts", "ends"), ("int32",)),
        same_dtype(args, ("q", "k")),
        one_device(args),
        f"head size {dim}; takes powers of two from {least} to 256" if odd or not least <= dim <= 256 else "",
        f"{heads} heads; takes 1 to 128" if not 1 <= heads <= 128 else "",
        f"{' and '.join(loose)} with gaps" if loose else "",
        f"{len(scale)} scales for {len(args['k'])} keys" if scale is not None and len(scale) != len(args["k"]) else "",
    )


KERNEL = Kernel(
    op="index_scores",
    technique="triton",
    summary="a tile of keys against passing queries, heads summed in registers",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(80, None), dtypes=DTYPES),
    supports=supports,
)
