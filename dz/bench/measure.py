"""Times on a device: medians of single calls after a warm-up, with the cache flushed between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLUSH = 256 << 20  # bytes written between calls: several times the last-level cache of any device so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds: median and the 20th and 80th percentile of `n` calls; `method` says how they were taken."""

    median: float
    p20: float
    p80: float
    n: int
    method: str


def measure(call: Callable[[], Any], device: torch.device, *, budget: float = 0.25) -> Times:
    """Time `call` for about `budget` seconds. On a CUDA device it is captured into a graph where it can be, so that
    what is timed is the device's work and not the host's launches; elsewhere by the host's clock."""
    if device.type != "cuda":
        return _by_clock(call, budget)
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    replay, method = _captured(call)
    flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)
    once = _events(replay, flush, 3)
    samples = _events(replay, flush, max(10, min(200, int(budget * 1e6 / (max(once) + 120.0)))))
    return _times(samples, method)


def _captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as e:  # a call that synchronises cannot be captured; the row says so
        torch.cuda.synchronize()
        return call, f"events ({str(e).splitlines()[0][:80]})"
    return graph.replay, "graph"


def _events(call: Callable[[], Any], flush: torch.Tensor, n: int) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def _by_clock(call: Callable[[], Any], budget: float) -> Times:
    call()
    samples: list[float] = []
    while (sum(samples) < budget * 1e6 and len(samples) < 50) or len(samples) < 3:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return _times(samples, "clock")


def _times(samples: list[float], method: str) -> Times:
    ordered = sorted(samples)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return Times(median=statistics.median(ordered), p20=at(0.2), p80=at(0.8), n=len(ordered), method=method)
