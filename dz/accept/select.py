"""-k EXPR: which checks of a list are meant, in pytest's little language."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from dz.errors import UsageError

_TOKEN = re.compile(r"\s*(\(|\)|[^\s()]+)")
Test = Callable[[str], bool]


def expression(text: str, names: Collection[str] = ()) -> Test:
    """A predicate on names from `and`, `or`, `not`, brackets, and parts of names (upper and lower case are one). A word
    that is one of `names` means that one alone, not every name that contains it.

    Raises UsageError for what cannot be read."""
    parser = _Parser(text, names)
    test = parser.either()
    if parser.next() is not None:
        raise parser.wrong(f"'{parser.next()}' is one too many")
    return test


class _Parser:
    def __init__(self, text: str, names: Collection[str]) -> None:
        self._text, self._tokens, self._at = text, _TOKEN.findall(text), 0
        self._names = {n.lower() for n in names}

    def next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def wrong(self, why: str) -> UsageError:
        return UsageError(
            f"-k '{self._text}' cannot be read", why, "write it as: text and not image", code="bad_expression"
        )

    def either(self) -> Test:
        left = self._both()
        while self._take("or"):
            left = _or(left, self._both())
        return left

    def _both(self) -> Test:
        left = self._one()
        while self._take("and"):
            left = _and(left, self._one())
        return left

    def _one(self) -> Test:
        if self._take("not"):
            inner = self._one()
            return lambda name: not inner(name)
        if self._take("("):
            inner = self.either()
            if not self._take(")"):
                raise self.wrong("a bracket is not closed")
            return inner
        token = self.next()
        if token is None or token in ("and", "or", ")"):
            raise self.wrong("a name is missing")
        self._at += 1
        word = token.lower()
        return (lambda name: name.lower() == word) if word in self._names else (lambda name: word in name.lower())

    def _take(self, token: str) -> bool:
        if self.next() != token:
            return False
        self._at += 1
        return True


def _or(a: Test, b: Test) -> Test:
    return lambda name: a(name) or b(name)


def _and(a: Test, b: Test) -> Test:
    return lambda name: a(name) and b(name)
