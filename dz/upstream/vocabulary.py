"""Facts about a tokenizer's tokens: which end a text, which are special, what bytes they stand for."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from typing import Any

from dz.core.source import Source

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def eos_token_ids(source: Source, tokenizer: Any = None) -> list[int]:
    """The ids that end a text: the union of configuration, generation configuration and tokenizer, in that order.
    Nested text configurations count; -1 and null stand for none."""
    found: dict[int, None] = {}
    for name in ("config.json", "generation_config.json"):
        path = source.path / name
        if path.is_file():
            raw = json.loads(path.read_text("utf-8"))
            for level in (
                raw,
                *(v for k, v in raw.items() if k.endswith(("text_config", "llm_config", "language_config"))),
            ):
                if isinstance(level, dict):
                    found |= dict.fromkeys(_ids(level.get("eos_token_id")))
    found |= dict.fromkeys(_ids(getattr(tokenizer, "eos_token_id", None)))
    return list(found)


def _ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that `skip_special_tokens` leaves out."""
    added = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return frozenset(
        i for i in added | set(tokenizer.all_special_ids) if not tokenizer.decode([i], skip_special_tokens=True)
    )


def byte_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens named <0xNN> that decode to a byte and not to their name."""
    named = [i for t, i in tokenizer.get_vocab().items() if _BYTE.match(t)]
    return frozenset(i for i in named if not _BYTE.match(tokenizer.decode([i])))


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The bytes of a token in vocabularies that spell bytes (byte-level, <0xNN>); None in others, and for tokens
    that are written as they are."""
    name = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(name, str) or token in tokenizer.added_tokens_decoder:
        return None
    match = _BYTE.match(name)
    if match and not _BYTE.match(tokenizer.decode([token])):
        return bytes([int(match.group(1), 16)])
    table = _byte_level_table()
    if _is_byte_level(tokenizer) and all(c in table for c in name):
        return bytes(table[c] for c in name)
    return None


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in repr(backend.decoder)


@functools.cache
def _byte_level_table() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: printable Latin-1 stands for itself, the other bytes are, in order,
    the characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}
