"""Response bodies as /openapi.json describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorBody(_Open):
    """Inside of an error."""

    message: str
    type: str
    param: str | None
    code: int


class Error(_Open):
    """Every answer that is not 2xx."""

    error: ErrorBody


class Usage(_Open):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AssistantMessage(_Open):
    """What the model said."""

    role: str
    content: str | None


class ChatChoice(_Open):
    """One answer of a chat."""

    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class ChatCompletion(_Open):
    """POST /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(_Open):
    """One continuation."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class Completion(_Open):
    """POST /v1/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(_Open):
    """A served model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(_Open):
    """GET /v1/models."""

    object: str
    data: list[ModelCard]


class Tokens(_Open):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(_Open):
    """POST /detokenize."""

    prompt: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": text}
    for status, text in {
        400: "The request is at fault; the message names the field.",
        401: "An API key is missing or wrong.",
        404: "No such model or path.",
        405: "The path does not take this method.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        422: "Not used; kept for clients that expect it.",
        429: "Too many requests are waiting.",
        500: "The server or the engine failed.",
        501: "The server's installation lacks something.",
        503: "The engine is loading, dead or shutting down.",
    }.items()
}


def ok(model: Any, *, events: bool = False) -> dict[int | str, dict[str, Any]]:
    """The entry for 200; with `events`, also as a stream."""
    out: dict[str, Any] = {"model": model, "description": "The answer."}
    if events:
        out["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: out}
