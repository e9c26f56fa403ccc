"""The prompts of the text checks: short and long, prose, code, numbers, other scripts; and one chat."""

from __future__ import annotations

from collections.abc import Sequence
from pydoc_data.topics import topics  # English prose that every Python has: thousands of words for long prompts

from dz.upstream.reference import Case, Facts

TEXTS = (
    "The capital of France is",
    'def fibonacci(n: int) -> int:\n    """The n-th number of the sequence, counted from 0."""\n',
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at a lower temperature, because",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233,",
    'Translate into German: "The train to Munich leaves at half past nine from platform four."\n\nGerman:',
    "日本の首都は東京です。韓国의 수도는 서울입니다. Столица России — Москва. 😀 L’été à Paris est",
    "Q: A farmer has 17 sheep. All but 9 run away. How many are left?\nA: Let us think step by step.",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "works": [',
    "Once upon a time, in a village at the edge of a great forest, there lived an old clockmaker who never slept. "
    "Every night the villagers saw the light in the workshop and heard the hammer, and every morning a new clock stood "
    "in the window. Nobody knew who bought them. One winter evening a girl named Mara knocked at the door and",
    "a",
)
FIRST = TEXTS[0]
CHAT = [{"role": "user", "content": "Name the three primary colours and say in one sentence why they are called that."}]
CHAT_ID = "chat"


def plain(count: int, texts: Sequence[str] = ()) -> list[str]:
    """`count` different prompts: `texts` (default TEXTS), then the same with a number before them."""
    given = list(texts or TEXTS)
    return [given[i % len(given)] if i < len(given) else f"{i}. {given[i % len(given)]}" for i in range(count)]


def cases(count: int, max_tokens: int, facts: Facts, texts: Sequence[str] = ()) -> list[Case]:
    """`count` generate cases: see `plain`, but that the last one is a chat where the model has a template. Without a
    tokenizer they are ids spread over the vocabulary."""
    if facts.tokenizer:
        return [_ids(i, max_tokens, facts.vocab_size) for i in range(count)]
    out = [Case(id=f"prompt{i}", text=text, max_tokens=max_tokens) for i, text in enumerate(plain(count, texts))]
    if not facts.chat and not texts:
        out[-1] = Case(id=CHAT_ID, messages=list(CHAT), max_tokens=max_tokens)
    return out


def long_text() -> str:
    """Some hundred thousand characters of prose, the same for one version of Python."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def _ids(i: int, max_tokens: int, vocab: int) -> Case:
    """Prompts of 3, 10, 17... ids: a multiplicative walk through the vocabulary that misses the special ids at 0-2."""
    span = max(vocab - 3, 1)
    tokens = [3 + (7919 * (k + 1) * (i + 1)) % span for k in range(3 + 7 * i)]
    return Case(id=f"prompt{i}", tokens=tokens, max_tokens=max_tokens)
