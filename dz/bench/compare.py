"""`dz bench compare`: two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dz.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One implementation on one shape in two runs; `ratio` is old over new: above 1 the new run is faster."""

    op: str
    shape: str
    impl: str
    old_us: float
    new_us: float
    ratio: float
    verdict: str


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, noise: float = 0.05) -> list[Change]:
    """The rows measured in both documents, largest loss first. `verdict`: slower and faster beyond `noise`, wrong when
    the new result is out of tolerance, else same. Raises UsageError for documents of another kind or of two devices."""
    for name, document in (("the first", old), ("the second", new)):
        if document.get("schema") != "dz.bench/1":
            what = f"{name} document is '{document.get('schema')}'"
            raise UsageError(what, "a dz.bench/1 document is expected", "dz bench ops --json", code="bad_document")
    here, there = (d["data"]["device"] for d in (old, new))
    if here != there:
        raise UsageError(f"'{here}' against '{there}'", "times of two devices say nothing", "run both on one device")
    before = {_key(r): r for r in old["data"]["rows"] if r["status"] == "measured"}
    changes = []
    for row in new["data"]["rows"]:
        was = before.get(_key(row))
        if was is None or row["status"] != "measured":
            continue
        ratio = was["median_us"] / row["median_us"]
        verdict = "faster" if ratio > 1 + noise else "slower" if ratio < 1 - noise else "same"
        wrong = row.get("error") is not None and not row["error"]["ok"]
        old_us, new_us = was["median_us"], row["median_us"]
        name = {k: row[k] for k in ("op", "shape", "impl")}
        changes.append(Change(**name, old_us=old_us, new_us=new_us, ratio=ratio, verdict="wrong" if wrong else verdict))
    return sorted(changes, key=lambda c: (c.verdict != "wrong", c.ratio))


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["op"], row["recipe"], row["shape"], row["impl"]
