"""From a request's fields and the model's defaults to the engine's Sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dz.core.messages import Sampling
from dz.core.source import Source
from dz.errors import UsageError
from dz.serve.errors import bad
from dz.serve.protocol import Generate

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def defaults(source: Source, choice: str) -> dict[str, float]:
    """What counts where a request says nothing: the sampling fields of the model's generation_config ("auto"), of a
    folder's, or none of them ("none", also "vllm"). `max_new_tokens` becomes a ceiling, as in vLLM.

    Raises UsageError when a named folder has no generation_config.json, or it cannot be read."""
    if choice in ("none", "vllm"):
        return {}
    path = (source.path if choice == "auto" else Path(choice)) / "generation_config.json"
    if choice != "auto" and not path.is_file():
        raise UsageError(
            f"--generation-config {choice}",
            f"there is no {path}",
            "give auto, none, or a folder with a generation_config.json",
            code="no_generation_config",
        )
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UsageError(
            f"{path} is not JSON", str(e), "mend it, or use --generation-config none", code="bad_json"
        ) from e
    given = {k: raw.get(k) for k in _DEFAULTS} if isinstance(raw, dict) else {}
    return {k: v for k, v in given.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def max_tokens(
    asked: int | None,
    prompt: int,
    limit: int,
    *,
    given: Mapping[str, float],
    otherwise: int | None,
    fields: tuple[str, str] = ("max_tokens", "prompt"),
) -> int:
    """How many tokens may be generated after `prompt` tokens when `limit` is the longest context. `asked` counts, else
    `otherwise`, else all the room there is; the model's own ceiling always. `fields` are the names of `asked` and of
    the prompt in the request. Raises ApiError 400 stating the maximum when it does not fit."""
    room = limit - prompt
    if room < 1:
        raise bad(
            f"This model's maximum context length is {limit} tokens. The prompt has {prompt} tokens, "
            "which leaves no room for an answer. Shorten the prompt.",
            fields[1],
        )
    ceiling = max(1, int(given["max_new_tokens"])) if given.get("max_new_tokens") else room
    if asked is None:
        return min(room if otherwise is None else otherwise, ceiling, room)
    if asked > room:
        raise bad(
            f"This model's maximum context length is {limit} tokens. The prompt has {prompt} tokens and {fields[0]} is "
            f"{asked}: at most {room} fit.",
            fields[0],
        )
    return min(asked, ceiling)


def sampling(
    body: Generate,
    given: Mapping[str, float],
    *,
    tokens: int,
    vocab: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    eos: Sequence[int] = (),
) -> Sampling:
    """The Sampling of a request; `eos` are ends of text that the engine does not know of.

    Raises ApiError 400 naming the field that is out of the model's range."""
    _check(body, tokens, vocab)

    def pick(name: str, neutral: float) -> float:
        value = getattr(body, name)
        return value if value is not None else given.get(name, neutral)

    return Sampling(
        max_tokens=tokens,
        min_tokens=min(body.min_tokens or 0, tokens),
        temperature=float(pick("temperature", 1.0)),
        top_p=float(pick("top_p", 1.0)),
        top_k=max(0, int(pick("top_k", 0))),
        min_p=float(pick("min_p", 0.0)),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=float(pick("repetition_penalty", 1.0)),
        seed=body.seed,
        stop_token_ids=(*(body.stop_token_ids or ()), *(() if body.ignore_eos else eos)),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias={int(k): float(v) for k, v in (body.logit_bias or {}).items()},
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
    )


def _check(body: Generate, tokens: int, vocab: int) -> None:
    if (body.min_tokens or 0) > tokens:
        raise bad(f"min_tokens: {body.min_tokens} is more than the {tokens} tokens that may be generated", "min_tokens")
    fields: dict[str, Any] = {
        "stop_token_ids": body.stop_token_ids or (),
        "allowed_token_ids": body.allowed_token_ids or (),
        "logit_bias": [int(k) for k in body.logit_bias or {}],
    }
    for name, ids in fields.items():
        wrong = [i for i in ids if i >= vocab]
        if wrong:
            raise bad(f"{name}: the model has no token {wrong[0]}; ids end at {vocab - 1}", name)
    if body.stream_options is not None and not body.streams:
        raise bad("stream_options: it is only for streams", "stream_options")
    if body.prompt_logprobs is not None and body.streams:
        raise bad("prompt_logprobs: it is not available in streams", "prompt_logprobs")
