"""Upstream's tokenizer, chat template and image processor of a repository, behind one object."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from dz.core.source import Source
from dz.errors import DzError, UsageError
from dz.upstream import vocabulary
from dz.upstream.chat import Chat, ChatOptions, Message, Prepared
from dz.upstream.detokenize import Detokenizer
from dz.upstream.loading import load_processor, load_tokenizer, takes_images

__all__ = ["ChatOptions", "Detokenizer", "Prepared", "Processor"]


class Processor:
    """Made by `Processor.load`. Encoding methods may run in another thread than decoding ones (these have a tokenizer
    of their own), but not in two threads at once."""

    def __init__(self, source: Source, tokenizer: Any, processor: Any, image_problem: DzError | None) -> None:
        self.source, self.tokenizer, self.processor, self.image_problem = source, tokenizer, processor, image_problem
        self.takes_images = takes_images(source)
        self.eos_token_ids = vocabulary.eos_token_ids(source, tokenizer)
        self.chat = Chat(source.name, tokenizer, processor)
        self._decoder = _twin(tokenizer)
        self._special = vocabulary.special_ids(self._decoder)
        self._byte_ids = vocabulary.byte_ids(self._decoder)
        self._anchor = self.encode("a", add_special_tokens=False)[-1:]
        self._token_text = functools.lru_cache(1 << 16)(self._text_of_token)

    @classmethod
    def load(cls, source: Source, *, trust: bool, chat_template: str | None = None) -> Processor:
        """Load through upstream's Auto classes; code of the repository runs only under `trust`. `chat_template` is the
        text of a template that replaces the repository's own.

        Raises Refused when there is no usable tokenizer. A missing image processor is no error here: it is kept in
        `image_problem` and raised when an image arrives."""
        processor, problem = None, None
        if takes_images(source):
            try:
                processor = load_processor(source, trust=trust)
            except DzError as e:
                problem = e
        tokenizer = getattr(processor, "tokenizer", None) or load_tokenizer(source, trust=trust)
        if chat_template is not None:
            for owner in (processor, tokenizer):
                if owner is not None:
                    owner.chat_template = chat_template
        return cls(source, tokenizer, processor, problem)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included."""
        return len(self.tokenizer)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token of the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text."""
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens; nothing is tidied up."""
        return self._decode([t for t in tokens if not (skip_special_tokens and t in self._special)])

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental decoder; its pieces joined equal `decode` of the whole."""
        mute = self._special if skip_special_tokens else frozenset()
        return Detokenizer(self._decode, byte_ids=self._byte_ids, mute=mute)

    def token_text(self, token: int) -> str:
        """The text of one token as inside a text: a leading space is kept, a part of a character is U+FFFD."""
        return self._token_text(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, also where they are only a part of a character."""
        found = vocabulary.token_bytes(self._decoder, token)
        return self._token_text(token).encode("utf-8", "replace") if found is None else found

    def info(self) -> dict[str, Any]:
        """Facts for clients that count tokens themselves: class, size, special tokens, chat template."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "model_max_length", "padding_side")
        facts = {n: getattr(self.tokenizer, n, None) for n in names}
        facts = {n: v if isinstance(v, str) or (isinstance(v, int) and v < 2**53) else None for n, v in facts.items()}
        kind, template = type(self.tokenizer).__name__, self.chat.template or None
        return {"tokenizer_class": kind, "vocab_size": self.vocab_size, "chat_template": template, **facts}

    def render(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        """The prompt text of a chat. Raises UsageError without a template, and when the template refuses the chat."""
        return self.chat.render(messages, options or ChatOptions())

    def prepare_chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> Prepared:
        """Tokens and media of a chat whose image parts are `{"type": "image", "image": PIL image}`. Equal to upstream's
        `apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)`, but that special
        tokens which a text quotes stay text.

        Raises UsageError (the chat is at fault), or EnvironmentFailure (an image came and its processor is missing)."""
        if any(p.get("type") == "image" for m in messages if isinstance(m.get("content"), list) for p in m["content"]):
            self._require_images()
        return self.chat.prepare(messages, options or ChatOptions())

    def _require_images(self) -> None:
        if self.image_problem is not None:
            raise self.image_problem
        if self.processor is None:
            raise UsageError(
                f"{self.source.name} takes no images",
                "its repository has no image processor",
                "send text only",
                code="no_vision",
            )

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _text_of_token(self, token: int) -> str:
        return self._decode([*self._anchor, token])[len(self._decode(self._anchor)) :]


def _twin(tokenizer: Any) -> Any:
    """A copy with a backend of its own; a tokenizer without backend is plain Python and can be shared."""
    return copy.deepcopy(tokenizer) if getattr(tokenizer, "backend_tokenizer", None) is not None else tokenizer
