"""Chat messages as clients send them, to messages as upstream's chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dz.serve.config import ImageLimits
from dz.serve.errors import bad
from dz.serve.images import image
from dz.serve.protocol import Message

_TEXT = ("text", "input_text", "output_text")
_NOT_TAKEN = "audio, video, files and other media are not supported"


def convert(messages: list[Message], limits: ImageLimits) -> list[dict[str, Any]]:
    """Messages with their parts in order and images decoded. Raises ApiError 400 naming the part at fault."""
    budget = [limits.count]
    return [_message(m, limits, budget, f"messages[{i}]") for i, m in enumerate(messages)]


def texts_of(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Every text in converted messages: contents and parts."""
    for message in messages:
        content = message.get("content", "")
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if part["type"] == "text")


def _message(message: Message, limits: ImageLimits, budget: list[int], where: str) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, **(message.model_extra or {})}
    if isinstance(message.content, list):
        parts = enumerate(message.content)
        out["content"] = [_part(p, limits, budget, f"{where}.content[{i}]") for i, p in parts]
    elif message.content is not None or "tool_calls" not in out:
        out["content"] = message.content if message.content is not None else ""
    if out.get("tool_calls") is not None:
        out["tool_calls"] = _tool_calls(out["tool_calls"], f"{where}.tool_calls")
    return out


def _part(part: Mapping[str, Any], limits: ImageLimits, budget: list[int], where: str) -> dict[str, Any]:
    kind = part.get("type", "text" if "text" in part else None)
    if kind in _TEXT:
        if not isinstance(part.get("text"), str):
            raise bad(f"{where}: its text must be a string", where)
        return {"type": "text", "text": part["text"]}
    if kind in ("image_url", "input_image"):
        budget[0] -= 1
        if budget[0] < 0:
            raise bad(f"{where}: more than {limits.count} images in one request", where)
        url = part.get("image_url")
        return {"type": "image", "image": image(url.get("url") if isinstance(url, Mapping) else url, limits, where)}
    raise bad(f"{where}: parts of type {str(kind)[:40]!r} are not taken; {_NOT_TAKEN}", where)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of earlier turns; templates take the arguments as an object, clients send them as text."""
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    ):
        raise bad(f"{where}: it must be a list of function calls", where)
    out = []
    for call in calls:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (json.JSONDecodeError, RecursionError) as e:
                raise bad(f"{where}: the arguments are not JSON: {str(e)[:100]}", where) from None
        out.append({**call, "function": {**call["function"], "arguments": arguments}})
    return out
