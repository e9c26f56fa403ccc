"""JSON in and out of HTTP bodies: strict on the way in, never failing on the way out."""

from __future__ import annotations

from typing import Any

import msgspec

DEEPEST = 64  # levels of nesting: more than any schema needs, far less than Python's stack
_DEEP = "the JSON is nested too deeply"


def load(body: bytes) -> Any:
    """The value of a JSON text. Raises ValueError with a readable reason: broken syntax, NaN, lone surrogates, nesting
    too deep, numbers too long."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ValueError(_DEEP) from None
    except UnicodeDecodeError:
        raise ValueError("the body is not UTF-8") from None
    except (msgspec.DecodeError, ValueError) as e:
        raise ValueError(" ".join(str(e).split())[:200]) from None
    level = [value] if type(value) in (dict, list) else []
    for _ in range(DEEPEST):
        level = [v for x in level for v in (x.values() if type(x) is dict else x) if type(v) in (dict, list)]
        if not level:
            return value
    raise ValueError(_DEEP)


def dump(value: Any) -> bytes:
    """JSON text of plain values; characters that UTF-8 cannot carry come as U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_clean(value))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, (list, tuple)) else value
