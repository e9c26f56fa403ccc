"""Log-probabilities in the two styles of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dz.core.messages import Logprob

FLOOR = -9999.0  # JSON has no minus infinity


class Vocabulary(Protocol):
    """How tokens are shown."""

    def token_text(self, token: int) -> str:
        """The text of a token."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token."""
        ...


@dataclass(frozen=True, slots=True)
class Shown:
    """Tokens as text, or as "token_id:N" where a request asks for that."""

    vocabulary: Vocabulary
    as_ids: bool = False

    def text(self, token: int) -> str:
        """How a token is called in an answer."""
        return f"token_id:{token}" if self.as_ids else self.vocabulary.token_text(token)

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token of a chat answer."""
        raw = self.vocabulary.token_bytes(token)
        return {"token": self.text(token), "logprob": max(logprob, FLOOR), "bytes": list(raw)}


def chat(entries: Sequence[Logprob], shown: Shown) -> dict[str, Any]:
    """`logprobs` of a chat choice: one item for each token, each with its own alternatives."""
    return {
        "content": [
            {**shown.entry(e.token, e.logprob), "top_logprobs": [shown.entry(t, lp) for t, lp in e.top]}
            for e in entries
        ],
        "refusal": None,
    }


@dataclass(slots=True)
class Columns:
    """`logprobs` of a completion choice, growing; `offset` is where the next token's text begins."""

    shown: Shown
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: int, entry: Logprob | None) -> None:
        """Append a token; the first token of a prompt has no entry."""
        text = self.shown.text(token)
        self.tokens.append(text)
        self.text_offset.append(self.offset)
        self.offset += len(self.shown.vocabulary.token_text(token))
        self.token_logprobs.append(None if entry is None else max(entry.logprob, FLOOR))
        self.top_logprobs.append(None if entry is None else self._top(entry))

    def take(self) -> dict[str, Any]:
        """What has been added since the last time."""
        names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        out = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, [])
        return out

    def _top(self, entry: Logprob) -> dict[str, float]:
        """The alternatives and the token itself by text. Where two tokens have one text, the likelier one counts, so
        that the largest value is that of the best token."""
        out: dict[str, float] = {}
        for token, logprob in [*entry.top, (entry.token, entry.logprob)]:
            text, value = self.shown.text(token), max(logprob, FLOOR)
            out[text] = max(value, out.get(text, value))
        return out


def prompt(entries: Sequence[Logprob | None], shown: Shown) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's form: for each prompt token its own and the alternatives, by id."""
    out: list[dict[str, Any] | None] = []
    for e in entries:
        if e is None:
            out.append(None)
            continue
        ranked = [(t, lp, i) for i, (t, lp) in enumerate(e.top, 1)] + [(e.token, e.logprob, e.rank)]
        out.append(
            {str(t): {"logprob": max(lp, FLOOR), "rank": r, "decoded_token": shown.text(t)} for t, lp, r in ranked}
        )
    return out
