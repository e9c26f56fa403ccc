"""Expert prefill from MXFP4 weights on a GPU: fold to FP8 and multiply, against a grouped product of 4-bit weights.

usage: python reports/bench/expert_prefill.py [--rows 16384 32768] [--out reports/bench/expert_prefill.json]

counted: tokens to FP8, weights folded into a workspace, FP8 product, one after the other. behind the product: the next
layer's weights are folded on a side stream while this layer's are multiplied. behind other work: they are folded while
the device does something else of a layer first, here a dense bfloat16 product; its own time is subtracted."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dz.bench.measure import Times, measure
from dz.bench.ops import software
from dz.bench.peers import PEERS
from dz.bench.workloads.grouped_gemm_fp8 import offsets
from dz.bench.workloads.grouped_gemm_mxfp4 import four_bit_weights
from dz.kernels.expert_gather.triton import run as to_eight_bit
from dz.kernels.grouped_gemm_fp8.triton import TUNE
from dz.kernels.grouped_gemm_fp8.triton import run as product
from dz.kernels.mxfp4_to_fp8.triton import fold
from dz.ops.grouped_gemm_mxfp4 import reference

SHAPE = {"experts": 56, "n": 6144, "k": 3584}  # gate and up projections of 56 of 896 experts
SMALL = {"rows": 64, "columns": 128, "warps": 4, "stages": 3, "per_sm": 2}  # leaves registers for a fold beside it
DENSE = (16384, 7168, 6144)  # the other work: about what the dense projections of such a layer take


def workspace(weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, row scales and spreads that a fold fills."""
    e, n, k = SHAPE.values()
    device = weights["packed"].device
    return (
        torch.empty(e, n, k, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(e, n, dtype=torch.float32, device=device),
        torch.empty(e, n, dtype=torch.int32, device=device),
    )


def beside(second: Callable[[], Any], first: Callable[[], Any], side: torch.cuda.Stream) -> None:
    """Both at once: `first` on this stream, `second` on the side stream in what room is left; joined at the end."""
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    first()
    with torch.cuda.stream(side):
        second()
    main.wait_stream(side)


def error(x: torch.Tensor, weights: dict[str, torch.Tensor], ends: torch.Tensor, got: torch.Tensor) -> float:
    """Relative error of one expert's rows against fp32."""
    e = int((ends[1:] - ends[:-1]).argmax())
    rows = slice(int(ends[e]), int(ends[e + 1]))
    some = {k: v[e : e + 1] for k, v in weights.items()}
    count = torch.tensor([0, rows.stop - rows.start], device=x.device)
    want = reference(x[rows].float(), **some, offsets=count)
    return float((got[rows].float() - want).norm() / want.norm())


def run(rows: int, device: torch.device) -> dict[str, Any]:
    """All times in microseconds for so many rows."""
    generator = torch.Generator(device).manual_seed(rows)
    weights = four_bit_weights(SHAPE, generator)
    ends = offsets(rows, SHAPE["experts"], generator)
    x = torch.randn(rows, SHAPE["k"], generator=generator, device=device).bfloat16()
    order = torch.arange(rows, dtype=torch.int32, device=device)
    this, after = workspace(weights), workspace(weights)
    a = torch.randn(DENSE[0], DENSE[1], generator=generator, device=device).bfloat16()
    b = torch.randn(DENSE[1], DENSE[2], generator=generator, device=device).bfloat16()
    side = torch.cuda.Stream()
    codes, scale = to_eight_bit(x, order, 1)

    def multiply() -> torch.Tensor:
        return product(*to_eight_bit(x, order, 1), *this[:2], ends)

    def counted() -> torch.Tensor:
        fold(**weights, codes=this[0], row_scales=this[1], spread=this[2])
        return multiply()

    def next_fold() -> None:
        fold(**weights, codes=after[0], row_scales=after[1], spread=after[2])

    def behind_small_tiles() -> None:
        with TUNE.override(SMALL):
            beside(next_fold, multiply, side)

    def behind_other() -> None:
        beside(next_fold, lambda: a @ b, side)
        multiply()

    out = counted()
    humming = next(p for p in PEERS if p.name == "humming")
    times: dict[str, Times] = {}
    if not humming.missing():
        peer = humming.make({"x": x, **weights, "offsets": ends})
        times["humming W4A16"] = measure(peer, device)
    times |= {
        "tokens to FP8": measure(lambda: to_eight_bit(x, order, 1), device),
        "fold": measure(next_fold, device),
        "FP8 product": measure(lambda: product(codes, scale, *this[:2], ends), device),
        "counted": measure(counted, device),
        "behind the product": measure(lambda: beside(next_fold, multiply, side), device),
        "behind the product, small tiles": measure(behind_small_tiles, device),
        "other work": measure(lambda: a @ b, device),
        "behind other work, with it": measure(behind_other, device),
    }
    us = {k: round(t.median, 1) for k, t in times.items()}
    us["behind other work"] = round(us["behind other work, with it"] - us["other work"], 1)
    ratios = {k: round(us["humming W4A16"] / us[k], 3) for k in us if "humming W4A16" in us and k in HEADLINES}
    return {"rows": rows, "us": us, "times faster": ratios, "relative error": error(x, weights, ends, out)}


HEADLINES = ("counted", "behind the product", "behind the product, small tiles", "behind other work")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--out", type=Path, default=Path("reports/bench/expert_prefill.json"))
    args = parser.parse_args()
    device = torch.device("cuda")
    results = []
    for rows in args.rows:
        results.append(run(rows, device))
        print(json.dumps(results[-1]), flush=True)
        torch.cuda.empty_cache()
    data = {"device": torch.cuda.get_device_name(), "software": software(), "shape": SHAPE, "results": results}
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
