"""The table that dz.ops.expert_cost reads, from a bench document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dz.errors import UsageError

PRODUCTS = {"registers": "grouped_gemm_mxfp4", "folded": "grouped_gemm_fp8"}


def tabulate(document: Mapping[str, Any], *, technique: str = "triton") -> dict[str, Any]:
    """A device's entry: points of both products and the fold, each in picoseconds a weight of a hit expert.

    The rows of the bench fall on any expert with equal chance, so `E (1 - (1 - 1 / E)^rows)` of E are hit. Shapes of
    one number of rows are averaged. Raises UsageError for a document without measured rows of all three ops."""
    rows = [r for r in document["data"]["rows"] if r["status"] == "measured"]
    table: dict[str, Any] = {}
    for name, op in PRODUCTS.items():
        table[name] = _points(r for r in rows if r["impl"] == f"{op}/{technique}")
    folds = [_per_weight(r, r["sizes"]["experts"]) for r in rows if r["impl"] == f"mxfp4_to_fp8/{technique}"]
    if not folds or not all(table.values()):
        raise UsageError(
            "a bench without the experts' products",
            f"{', '.join(PRODUCTS.values())} and mxfp4_to_fp8 are expected",
            "dz bench ops grouped_gemm_mxfp4 grouped_gemm_fp8 mxfp4_to_fp8 --json",
            code="bad_document",
        )
    table["fold"] = round(sum(folds) / len(folds), 4)
    return table


def _per_weight(row: Mapping[str, Any], hit: float) -> float:
    return row["median_us"] * 1e6 / (hit * row["sizes"]["n"] * row["sizes"]["k"])


def _points(rows: Iterator[Mapping[str, Any]]) -> list[list[float]]:
    found: dict[float, list[float]] = {}
    for row in rows:
        experts, count = row["sizes"]["experts"], row["sizes"]["rows"]
        hit = experts * (1 - (1 - 1 / experts) ** count)
        found.setdefault(round(count / hit, 3), []).append(_per_weight(row, hit))
    return [[each, round(sum(times) / len(times), 4)] for each, times in sorted(found.items())]
