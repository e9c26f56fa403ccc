"""Structures of the installed upstream that an op is known to take, by digest: what a variant is compared with.

The digests were collected by `reports/survey.py` from every site that an op recognised as known. A release of upstream
that has other sources has other digests; those it lacks are passed over."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from dz.core import jsonio

_FILE = Path(__file__).with_name("fingerprints.json")


@cache
def fingerprints() -> dict[str, frozenset[int]]:
    """Digests of `dz.inspect.form.Form.digest` by op."""
    return {op: frozenset(digests) for op, digests in jsonio.read(_FILE).items()}
