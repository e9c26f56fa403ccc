"""What this device does at best, measured: the rates that floors are taken from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dz.bench.measure import measure
from dz.bench.workload import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """`bandwidth` in bytes/s (a copy or a pass of one element each, the faster; read and written bytes counted);
    `flops` by dtype in FLOP/s (a square matrix product of random data); `empty_us` is what an empty call
    shows on this clock."""

    bandwidth: float
    flops: dict[str, float]
    empty_us: float


def ceilings(device: torch.device, *, small: bool) -> Ceilings:
    """Measure them; `small` keeps sizes fit for a CPU in a test."""
    size, n = (1 << 22, 256) if small else (1 << 31, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    wide, out = source.view(torch.int32), target.view(torch.int32)
    ways = (lambda: target.copy_(source), lambda: torch.neg(wide, out=out))  # a driver's copy is not always the faster
    bandwidth = 2 * size / min(measure(way, device).median for way in ways) * 1e6
    flops = {}
    for name in ("float32",) if small else ("bfloat16", "float8_e4m3fn"):
        a, b = (torch.randn(n, n, device=device) for _ in range(2))
        flops[name] = 2 * n**3 / measure(_product(a, b, name), device).median * 1e6
    one = torch.zeros(1, device=device)
    return Ceilings(bandwidth=bandwidth, flops=flops, empty_us=measure(lambda: one.add_(1), device).median)


def _product(a: torch.Tensor, b: torch.Tensor, name: str):  # noqa: ANN202  a closure
    x, y = (t.to(getattr(torch, name)) for t in (a, b))
    if name != "float8_e4m3fn":
        return lambda: x @ y
    rows = torch.ones(len(x), 1, device=x.device)
    columns = torch.ones(1, len(y), device=y.device)
    transposed = y.t().contiguous().t()
    scaled_mm = torch.ops.aten._scaled_mm
    return lambda: scaled_mm(x, transposed, rows, columns, out_dtype=torch.bfloat16)


def floor(cost: Cost, best: Ceilings) -> tuple[float, str]:
    """The floor in microseconds, and what sets it: "memory" or the dtype of the arithmetic.

    A dtype whose rate was not measured is held against the fastest one that was: a floor that is too low, never too
    high."""
    terms = {"memory": cost.bytes / best.bandwidth * 1e6}
    for name, work in cost.flops.items():
        terms[name] = work / best.flops.get(name, max(best.flops.values())) * 1e6
    bound = max(terms, key=lambda name: terms[name])
    return terms[bound], bound
