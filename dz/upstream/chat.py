"""Chat templates: from messages to prompt text, tokens and the processor's tensors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dz.errors import DzError, UsageError
from dz.upstream.quotes import Quotes

Message = Mapping[str, Any]
_PROBE = "dzprobe"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a request may say about the template: `variables` are its own variables (`chat_template_kwargs`)."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Forms:
    """Which forms of `content` a template shows as text: a plain string, a list of parts."""

    strings: bool
    lists: bool

    def fit(self, message: Message) -> dict[str, Any]:
        """The message in a form that the template takes; lists of text parts and strings stand for each other."""
        content = message.get("content")
        if isinstance(content, str) and self.lists and not self.strings:
            return {**message, "content": [{"type": "text", "text": content}]}
        if (
            isinstance(content, list)
            and self.strings
            and not self.lists
            and all(p.get("type") == "text" for p in content)
        ):
            return {**message, "content": "\n".join(p["text"] for p in content)}
        return dict(message)


def forms(render: Callable[[list[dict[str, Any]]], str]) -> Forms:
    """Ask a template, by rendering a one-word chat in both forms. Raises what the template raises when both fail."""
    strings = lists = False
    problem: Exception | None = None
    try:
        strings = _PROBE in render([{"role": "user", "content": _PROBE}])
    except Exception as e:  # noqa: BLE001  a template may raise anything
        problem = e
    try:
        text = render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        lists = _PROBE in text and not re.search(rf"[\"']text[\"']\s*:\s*[\"']{_PROBE}", text)
    except Exception as e:  # noqa: BLE001  see above
        problem = problem or e
    if not (strings or lists):
        raise problem or ValueError("it does not show the text of a user message")
    return Forms(strings, lists)


def template_variables(given: Mapping[str, Any], template: str, reserved: Callable[..., Any]) -> dict[str, Any]:
    """The given variables that the template mentions. Raises UsageError for names that steer upstream's function
    instead of the template."""
    names = inspect.signature(reserved).parameters
    for key in given:
        if key in names:
            raise UsageError(
                f"chat_template_kwargs has '{key}'",
                "it is no variable of the template, it steers how the template is applied",
                "leave it out",
                code="bad_template_variable",
            )
    return {k: v for k, v in given.items() if re.search(rf"\b{re.escape(k)}\b", template)}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt: final token ids (image placeholders expanded) and every other tensor that upstream's processor made,
    by its name (`pixel_values`, `image_grid_thw`, `mm_token_type_ids`, ...), as the processor shaped it."""

    tokens: list[int]
    media: dict[str, Any] = field(default_factory=dict)


class Chat:
    """One chat template with the tokenizer or processor that applies it. `problem` is empty if chatting works, else it
    says why not."""

    def __init__(self, name: str, tokenizer: Any, processor: Any) -> None:
        self.tokenizer, self.processor = tokenizer, processor
        self.owner = processor if getattr(processor, "chat_template", None) else tokenizer
        self.quotes = Quotes(_markers(tokenizer, processor))
        self.template, self._forms, self.problem = "", Forms(False, False), ""
        try:
            self.template = _template(self.owner)
            self._forms = forms(lambda m: self._text(m, ChatOptions()))
        except Exception as e:  # noqa: BLE001  a template may raise anything
            said = e.why if isinstance(e, DzError) else f"{type(e).__name__}: {e}"
            why = f"the chat template of {name} fails on a plain chat: {said}"
            self.problem = why if self.template else f"{name} has no chat template"

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The prompt's text. Raises UsageError when there is no template and when it refuses the chat."""
        return self._text(self._fit(messages), options)

    def prepare(self, messages: Sequence[Message], options: ChatOptions) -> Prepared:
        """Tokens and media of a chat. Raises UsageError; what the processor says about the images is its reason."""
        fitted = self._fit(messages)
        images = [p for m in fitted for p in _parts(m) if p.get("type") == "image"]
        quoted = self.quotes.found([_words(m) for m in fitted])
        if quoted and not images:
            hidden, split = self.quotes.hide(fitted)
            return Prepared(self._encode(split(self._text(hidden, options))))
        given = self._arguments(options)
        if quoted and "sanitize_control_tokens" in inspect.signature(self.owner.apply_chat_template).parameters:
            given["sanitize_control_tokens"] = True
        out = self._apply(
            fitted, {**given, "tokenize": True, "return_dict": True, "return_tensors": "pt"}, bool(images)
        )
        rest = {k: v for k, v in out.items() if k not in ("input_ids", "attention_mask") and images}
        return Prepared(out["input_ids"][0].tolist(), rest)

    def _fit(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if self.problem:
            raise UsageError(
                self.problem,
                "without it a chat cannot be turned into a prompt",
                "send the prompt to /v1/completions, or start with --chat-template FILE",
                code="no_chat_template",
            )
        return [self._forms.fit(m) for m in messages]

    def _arguments(self, options: ChatOptions) -> dict[str, Any]:
        variables = template_variables(options.variables, self.template, self.tokenizer.apply_chat_template)
        return {
            "add_generation_prompt": options.add_generation_prompt,
            "continue_final_message": options.continue_final_message,
            **({"documents": list(options.documents)} if options.documents else {}),
            **variables,
        }

    def _text(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        return self._apply(messages, {**self._arguments(options), "tokenize": False}, False)

    def _apply(self, messages: list[dict[str, Any]], given: dict[str, Any], images: bool) -> Any:
        try:
            return self.owner.apply_chat_template(messages, **given)
        except DzError:
            raise
        except Exception as e:
            said = " ".join(f"{type(e).__name__}: {e}".split())[:500]
            what = "the model's processor refuses this chat" if images else "the chat template refuses these messages"
            raise UsageError(what, said, "change the messages", code="bad_images" if images else "bad_messages") from e

    def _encode(self, pieces: list[tuple[str, bool]]) -> list[int]:
        """Tokens of a rendered text whose quoted markers are to stay text; special tokens round it as upstream does."""
        out: list[int] = []
        for text, quoted in pieces:
            out += self._plain(text) if quoted else self._ids(text)
        bos = self.tokenizer.bos_token
        if self.owner is self.tokenizer or (bos and pieces and pieces[0][0].startswith(bos)):
            return out
        bare, dressed = self._ids("a"), list(self.tokenizer("a")["input_ids"])
        at = next((i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), 0)
        return dressed[:at] + out + dressed[at + len(bare) :]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain(self, marker: str) -> list[int]:
        """A marker's characters as tokens. Cut in two, it cannot be recognised, however it was added."""
        whole = self.tokenizer.convert_tokens_to_ids(marker)
        ids = list(self.tokenizer(marker, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        return ids if whole not in ids else self._ids(marker[:1]) + self._ids(marker[1:])


def _template(owner: Any) -> str:
    """The text of the default template. Raises ValueError when there is none."""
    given = owner.chat_template
    found = given.get("default") if isinstance(given, dict) else given
    if not found:
        raise ValueError("there is no template")
    return found


def _markers(tokenizer: Any, processor: Any) -> list[str]:
    """Every special token, and the processor's placeholders even where these are not marked as special."""
    special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    media = [getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio")]
    return special + [m for m in media if isinstance(m, str)]


def _parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [p for p in content if isinstance(p, Mapping)] if isinstance(content, list) else []


def _words(message: Message) -> Any:
    """What of a message the user wrote: all but the role and the images."""
    content = message.get("content")
    if isinstance(content, list):
        content = [p.get("text") for p in _parts(message)]
    return {**{k: v for k, v in message.items() if k != "role"}, "content": content}
