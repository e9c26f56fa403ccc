"""Fields that dz cannot honour: refused by name when they ask for something, passed over when they ask for nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dz.serve.errors import ApiError, bad
from dz.serve.protocol import Body

log = logging.getLogger("dz.serve")


def _is(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == h and type(value) is type(h) for h in harmless)


_nothing = _is()

# field -> (which values ask for nothing beside null, what is missing)
UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (_is([]), "tool calls are not supported"),
    "functions": (_is([]), "tool calls are not supported"),
    "tool_choice": (_is("none", "auto"), "tool calls are not supported"),
    "function_call": (_is("none", "auto"), "tool calls are not supported"),
    "response_format": (_is({"type": "text"}), "constrained output is not supported"),
    "structured_outputs": (_nothing, "constrained output is not supported"),
    "guided_json": (_nothing, "constrained output is not supported"),
    "guided_regex": (_nothing, "constrained output is not supported"),
    "guided_choice": (_nothing, "constrained output is not supported"),
    "guided_grammar": (_nothing, "constrained output is not supported"),
    "best_of": (_is(1), "only what was asked for is generated"),
    "use_beam_search": (_is(False), "beam search is not supported"),
    "length_penalty": (_is(1, 1.0), "beam search is not supported"),
    "suffix": (_is(""), "insertion is not supported"),
    "bad_words": (_is([]), "it is not supported"),
    "truncate_prompt_tokens": (_nothing, "prompts are never cut"),
    "chat_template": (_nothing, "a template in a request is not trusted; start the server with --chat-template"),
    "mm_processor_kwargs": (_is({}), "the processor's settings are fixed"),
    "media_io_kwargs": (_is({}), "the processor's settings are fixed"),
    "thinking_token_budget": (_nothing, "it is not supported"),
    "include_reasoning": (_is(True), "reasoning is not told apart from the answer"),
    "priority": (_is(0), "requests are served in their order"),
    "modalities": (_is(["text"]), "only text is generated"),
    "audio": (_nothing, "only text is generated"),
    "prediction": (_nothing, "it is not supported"),
    "web_search_options": (_nothing, "it is not supported"),
    "store": (_is(False), "nothing is stored"),
    "service_tier": (_is("auto", "default"), "there is one tier"),
    "kv_transfer_params": (_nothing, "it is not supported"),
    "logits_processors": (_is([]), "it is not supported"),
    "prompt_embeds": (_nothing, "it is not supported"),
    "top_a": (_is(0, 0.0), "it is not supported"),
    "typical_p": (_is(1, 1.0), "it is not supported"),
    "dimensions": (_nothing, "it is not supported"),
    "verbosity": (_nothing, "the model's chat template decides"),
    "detokenize": (_is(True), "text is always decoded; ask for token ids beside it with return_token_ids"),
    "spaces_between_special_tokens": (_is(True), "the tokenizer decides"),
}
# known, and without meaning here: who asks, and hints to caches and routers
HARMLESS = frozenset(
    {"user", "metadata", "request_id", "session_id", "cache_salt", "parallel_tool_calls", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)


def check(body: Body, *, prefix: str = "") -> None:
    """Refuse what would have to be ignored. Raises ApiError 400 naming the field. Unknown fields are logged."""
    for name, value in (body.model_extra or {}).items():
        if name in UNSUPPORTED:
            asks_nothing, why = UNSUPPORTED[name]
            if value is not None and not asks_nothing(value):
                raise bad(f"{prefix}{name}: {why}", prefix + name)
        elif name not in HARMLESS:
            log.warning("a request has the unknown field %r; it has no effect", (prefix + name)[:100])


def validation(errors: list[Any]) -> ApiError:
    """The 400 for pydantic's findings: the first one, with the path of its field."""
    first = errors[0]
    path = [str(p) for p in first.get("loc", ()) if p != "body"]
    said = str(first.get("msg", "it is not valid")).removeprefix("Value error, ")
    name = ".".join(path)[:100]
    return bad(f"{name}: {said}" if name else said, path[0][:100] if path else None)
