"""Texts that quote a tokenizer's own markers: they stay text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Quotes:
    """Markers that users quote in their texts, kept from becoming the markers themselves.

    `hide` puts a unique stand-in for each quoted marker before the template is rendered, `encode` turns the rendered
    text into tokens piece by piece, each stand-in as the marker's plain characters."""

    def __init__(self, markers: Sequence[str]) -> None:
        by_length = sorted({m for m in markers if m.strip()}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length))) if by_length else None

    def found(self, value: Any) -> bool:
        """Whether any string inside `value` quotes a marker."""
        if isinstance(value, str):
            return self._pattern is not None and bool(self._pattern.search(value))
        if isinstance(value, Mapping):
            return any(self.found(v) for v in value.values())
        return isinstance(value, (list, tuple)) and any(map(self.found, value))

    def hide(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], Callable[[str], list[tuple[str, bool]]]]:
        """The messages with stand-ins, and a function that splits a rendered text into (piece, is a quoted marker)."""
        nonce = secrets.token_hex(8)
        seen: list[str] = []

        def stand_in(match: re.Match[str]) -> str:
            seen.append(match.group())
            return f"\uf8ff{nonce}:{len(seen) - 1}\uf8ff"

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(stand_in, value) if self._pattern else value
            if isinstance(value, Mapping):
                return {k: walk(v) for k, v in value.items()}
            return [walk(v) for v in value] if isinstance(value, (list, tuple)) else value

        def split(text: str) -> list[tuple[str, bool]]:
            parts = re.split(f"\uf8ff{nonce}:(\\d+)\uf8ff", text)
            out = [(seen[int(p)], True) if i % 2 else (p, False) for i, p in enumerate(parts)]
            return [(p, quoted) for p, quoted in out if p]

        return [{**walk(m), "role": m.get("role")} for m in messages], split
