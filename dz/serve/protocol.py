"""The request bodies. Types are strict; fields that dz does not know are kept in `model_extra` for `fields.check`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, field_validator

INT64 = 2**63
MAX_CHOICES = 128  # of one prompt
MAX_PROMPTS = 1024  # in one request
MAX_STOPS, MAX_STOP_CHARS = 64, 1000

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _prompts(value: Any) -> list[str | list[int]]:
    """A prompt in any of its four forms as a list of texts or id lists."""

    def ids(v: Any) -> bool:
        return isinstance(v, list) and bool(v) and all(type(t) is int and 0 <= t < 2**31 for t in v)

    many = value if isinstance(value, list) and value and all(isinstance(p, str) or ids(p) for p in value) else None
    if many is None and (isinstance(value, str) or ids(value)):
        many = [value]
    if many is None:
        raise ValueError("it must be a text, a list of texts, a list of token ids, or a list of lists of token ids")
    if len(many) > MAX_PROMPTS:
        raise ValueError(f"{len(many)} prompts in one request; at most {MAX_PROMPTS} are taken")
    return many


def _stops(value: Any) -> list[str]:
    """Stop strings: one or several."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        raise ValueError("it must be a text or a list of texts, none of them empty")
    if len(texts) > MAX_STOPS or any(len(t) > MAX_STOP_CHARS for t in texts):
        raise ValueError(f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters are taken")
    return texts


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
Stops = Annotated[list[str], PlainValidator(_stops), WithJsonSchema(_TEXTS)]
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT)]


class Body(BaseModel):
    """What all bodies share: strict types, no NaN, unknown fields kept."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    """How a stream reports usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generate(Body):
    """The fields that chat and completions share. None is "not given": the model's own default counts then."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, lt=INT64)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops = []
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = Field(None, ge=0, lt=INT64)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value and not all(k.isdecimal() and len(k) < 11 for k in value):
            raise ValueError("its keys must be token ids")
        return value

    @property
    def streams(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.stream)

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return self.n or 1


class CompletionRequest(Generate):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = True


class Message(Body):
    """A message of a chat. Fields beyond these (tool calls, names) go to the chat template as they are."""

    role: str = Field(min_length=1, max_length=64)
    content: str | list[dict[str, Any]] | None = None


class Template(Body):
    """The fields that steer the chat template."""

    messages: list[Message] = Field(min_length=1, max_length=10_000)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class ChatRequest(Generate, Template):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=0, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=10_000)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
