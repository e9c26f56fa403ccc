"""Log-probabilities in answers."""

import json
from math import inf

import pytest

from dz.core.messages import Logprob
from dz.serve import logprobs
from dz.serve.jsonbody import dump
from dz.serve.logprobs import Columns, Shown


class Words:
    """Tokens 0 and 1 are parts of characters with the same text."""

    def token_text(self, token):
        return ["\ufffd", "\ufffd", "cat", " dog"][token]

    def token_bytes(self, token):
        return [b"\xed", b"\x95", b"cat", b" dog"][token]


@pytest.mark.parametrize(("chosen", "best"), [(0, 1), (1, 0), (2, 0), (0, 2), (3, 3)])
def test_greedy_is_the_equality_of_two_numbers_even_with_equal_texts(chosen, best):
    own = -0.1 if chosen == best else -0.7
    top = sorted({best: -0.1, chosen: own}.items(), key=lambda p: -p[1])
    columns = Columns(Shown(Words()))
    columns.add(chosen, Logprob(chosen, own, 1 + (chosen != best), top))
    out = columns.take()
    assert (out["token_logprobs"][0] == max(out["top_logprobs"][0].values())) == (chosen == best)


def test_the_chosen_token_is_always_among_the_alternatives():
    columns = Columns(Shown(Words()))
    columns.add(3, Logprob(3, -5.0, 9, [(2, -0.1)]))
    columns.add(3, Logprob(3, -5.0, 9, []))
    assert columns.take()["top_logprobs"] == [{"cat": -0.1, " dog": -5.0}, {" dog": -5.0}]


def test_offsets_go_on_over_pieces():
    columns = Columns(Shown(Words()), offset=10)
    columns.add(2, None)
    assert columns.take()["text_offset"] == [10]
    columns.add(3, Logprob(3, -1.0, 1, []))
    columns.add(2, Logprob(2, -1.0, 1, []))
    assert columns.take()["text_offset"] == [13, 17]
    as_ids = Columns(Shown(Words(), as_ids=True))
    for _ in range(2):
        as_ids.add(3, None)
    out = as_ids.take()
    assert (out["tokens"], out["text_offset"]) == (["token_id:3", "token_id:3"], [0, 4])


def test_minus_infinity_is_a_number_in_json():
    entry = Logprob(2, -inf, 4, [(3, 0.0), (1, -inf)])
    columns = Columns(Shown(Words()))
    columns.add(2, entry)
    for value in (
        columns.take(),
        logprobs.chat([entry], Shown(Words())),
        logprobs.prompt([None, entry], Shown(Words())),
    ):
        text = dump(value)
        assert b"-9999" in text and b"null" not in text.replace(b'"refusal":null', b"").replace(b"[null,", b"[")
        json.loads(text)


def test_chat_entries_have_their_own_alternatives():
    entries = [Logprob(2, -0.5, 1, [(2, -0.5), (3, -1.5)]), Logprob(3, -0.25, 1, [(3, -0.25), (2, -2.0)])]
    content = logprobs.chat(entries, Shown(Words()))["content"]
    assert [c["token"] for c in content] == ["cat", " dog"]
    assert [[t["token"] for t in c["top_logprobs"]] for c in content] == [["cat", " dog"], [" dog", "cat"]]
    assert content[1]["bytes"] == list(b" dog")
