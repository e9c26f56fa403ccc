"""What a layer of MXFP4 experts costs each way, from measured tables: in registers, or folded to FP8 first.

A product over sorted rows reads every hit expert's weights once and then depends on how many rows an expert has, so its
time is kept as picoseconds for one weight of a hit expert, by rows for each of them. Between measured points it is a
straight line; below the first it stays (the weights are what is read), above the last it goes on as between the last
two. Folding costs the same for every weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from dz.core import jsonio
from dz.errors import EnvironmentFailure, UsageError
from dz.shipped import folder

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one device: `registers` and `folded` are (rows a hit expert, picoseconds a weight) in rising order for the
    two products, `fold` picoseconds a weight of the conversion."""

    registers: Points
    folded: Points
    fold: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The cheaper `way`, both times in microseconds, and the comparison in words."""

    way: Literal["registers", "folded"]
    registers_us: float
    folded_us: float
    reason: str


def at(points: Points, rows: float) -> float:
    """The value at `rows`; see the module."""
    if len(points) == 1 or rows <= points[0][0]:
        return points[0][1]
    right = next((i for i, p in enumerate(points) if i and rows <= p[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


def choose(*, rows: int, hit: int, weights: int, costs: Costs, hidden: bool = False) -> Choice:
    """The cheaper way for `rows` sorted rows over `hit` experts of so many `weights` each.

    `hidden`: the fold runs beside other work and is not counted. Raises UsageError when rows and experts cannot
    belong together."""
    if not 0 <= hit <= rows or (rows > 0) != (hit > 0) or weights <= 0:
        what = f"{rows} rows over {hit} experts of {weights} weights"
        raise UsageError(what, "an expert is hit by one row at least", "check the offsets", code="bad_argument")
    if not rows:
        return Choice(way="registers", registers_us=0.0, folded_us=0.0, reason="no rows")
    each, scale = rows / hit, hit * weights * 1e-6
    registers = at(costs.registers, each) * scale
    folded = (at(costs.folded, each) + (0.0 if hidden else costs.fold)) * scale
    way = "folded" if folded < registers else "registers"
    counted = "hidden" if hidden else "counted"
    reason = f"{each:.0f} rows an expert: {registers:.0f} us in registers, {folded:.0f} us folded, conversion {counted}"
    return Choice(way=way, registers_us=registers, folded_us=folded, reason=reason)


def parse(table: Mapping[str, Any]) -> Costs:
    """A device's entry of costs.json."""
    lines = {name: [(float(r), float(ps)) for r, ps in table[name]] for name in ("registers", "folded")}
    return Costs(**lines, fold=float(table["fold"]))


@cache
def costs_of(device: str) -> Costs:
    """What was measured on a device of this name. Raises EnvironmentFailure when nothing was."""
    table = jsonio.read(folder("kernels") / "grouped_gemm_mxfp4" / "costs.json")
    if device not in table:
        raise EnvironmentFailure(
            f"no costs of experts were measured on '{device}'",
            f"there are those of {', '.join(table)}",
            "dz bench ops grouped_gemm_mxfp4 grouped_gemm_fp8 mxfp4_to_fp8 --json",
            code="not_measured",
        )
    return parse(table[device])
