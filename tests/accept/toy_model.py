"""A deterministic toy language model in plain Python: what follows depends on every token before."""

import math
import random

VOCAB, EOS = 40, 2


def encode(text):
    """Three ids are special; every byte of a text is one of the others."""
    return [3 + b % (VOCAB - 3) for b in text.encode()]


def encode_chat(messages, picture):
    """Messages to ids; `picture(part)` gives the bytes behind an image part."""
    out = [1]
    for message in messages:
        parts = message["content"]
        for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
            out += encode(part["text"]) if part["type"] == "text" else [0, *_picture(picture(part)), 0]
    return out


def _picture(data):
    return [3 + random.Random(data + bytes([i])).randrange(VOCAB - 3) for i in range(5)]


def decode(tokens):
    return "".join(chr(60 + t) for t in tokens)


def logits(tokens):
    """Scores [V] of what comes after the tokens."""
    state = 17
    for t in tokens:
        state = (state * 1_000_003 + t + 1) % (1 << 61)
    draw = random.Random(state)
    row = [draw.gauss(0, 3) for _ in range(VOCAB)]
    row[0] = row[1] = -40.0
    row[EOS] = -40.0 if sum(tokens) % 61 else 20.0
    return row


def logprobs(tokens, sharper=1.0):
    """Natural-log probabilities [V] of what comes after the tokens."""
    row = [v * sharper for v in logits(tokens)]
    total = math.log(sum(map(math.exp, row)))
    return [v - total for v in row]


def best(row, k):
    """The k likeliest (id, logprob), best first; of equal ones the lower id."""
    return sorted(enumerate(row), key=lambda iv: (-iv[1], iv[0]))[:k]


def generate(prompt, count):
    """(tokens without the end token, end token or None, rows of logprobs: one for each step, the ending one too)."""
    tokens, rows = list(prompt), []
    for _ in range(count):
        rows.append(logprobs(tokens))
        token = best(rows[-1], 1)[0][0]
        if token == EOS:
            return tokens[len(prompt) :], EOS, rows
        tokens.append(token)
    return tokens[len(prompt) :], None, rows
