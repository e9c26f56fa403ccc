"""Stop strings, however the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dz.core.messages import Logprob, Output
from dz.serve.assemble import Assembler, Piece
from dz.serve.stops import StopStrings
from dz.upstream.detokenize import Detokenizer


def whole(text, stops, include=False):
    """What char-by-char reading gives: up to the first stop string to be complete."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def in_pieces(pieces, stops, include=False):
    finder, out = StopStrings(stops, include=include), ""
    for piece in pieces:
        text, hit = finder.push(piece)
        out += text
        if hit is not None:
            return out, hit
    return out + finder.flush(), None


texts = st.text(alphabet="abc", max_size=24)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=3)


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 24)), include=st.booleans())
def test_any_cut_gives_the_same(text, stops, cuts, include):
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert in_pieces(pieces, stops, include) == whole(text, stops, include)


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    finder = StopStrings(["END"])
    assert finder.push("the E") == ("the ", None)
    assert finder.push("x") == ("Ex", None)
    assert finder.push("EN") == ("", None)
    assert finder.push("D more") == ("", "END")


def test_the_first_to_be_complete_wins_and_of_these_the_longest():
    assert in_pieces(["abcd"], ["bcd", "bc"]) == ("a", "bc")
    assert in_pieces(["abc"], ["c", "bc", "abc"]) == ("", "abc")


LETTERS = "abcdefgh"


def assembler(**options):
    return Assembler(Detokenizer(lambda ids: "".join(LETTERS[i] for i in ids)), **options)


def feed(a, *outputs):
    piece = Piece()
    for output in outputs:
        piece.add(a.feed(output))
    return piece


def out(text, finish=None, stop=None, logprobs=False):
    tokens = [LETTERS.index(c) for c in text]
    lps = [Logprob(t, -float(i), 1, [(t, -float(i))]) for i, t in enumerate(tokens)] if logprobs else None
    return Output("x", tokens, finish=finish, stop_token=stop, logprobs=lps)


def test_a_stop_string_inside_a_chunk_drops_the_rest_of_it():
    piece = feed(assembler(stops=["de"]), out("abc", logprobs=True), out("defg", logprobs=True))
    assert (piece.text, piece.finish, piece.reason) == ("abc", "stop", "de")
    assert piece.tokens == [0, 1, 2, 3, 4]
    assert [lp.token for lp in piece.logprobs] == [0, 1, 2, 3, 4]


def test_held_text_comes_out_at_the_end():
    assert feed(assembler(stops=["gh"]), out("abg"), out("", finish="length")).text == "abg"


@pytest.mark.parametrize("include", [False, True])
def test_stop_tokens(include):
    piece = feed(assembler(stop_token_ids=[3], include_stop=include), out("ab"), out("c", finish="stop", stop=3))
    assert piece.text == ("abcd" if include else "abc")
    assert piece.tokens == [0, 1, 2, 3]
    assert (piece.finish, piece.reason) == ("stop", 3)


def test_a_models_own_end_has_no_reason():
    piece = feed(assembler(include_stop=True), out("a", finish="stop", stop=3))
    assert (piece.text, piece.tokens, piece.finish, piece.reason) == ("a", [0, 3], "stop", None)


def test_min_tokens_is_out_of_reach_of_stop_strings():
    piece = feed(assembler(stops=["b", "cd"], min_tokens=3), out("abcd"), out("bcd", finish="length"))
    assert (piece.text, piece.reason) == ("abcd", "b")


def test_each_token_has_its_own_logprob_in_chunks_of_three():
    piece = feed(assembler(), out("abc", logprobs=True), out("def", logprobs=True))
    assert [lp.token for lp in piece.logprobs] == [0, 1, 2, 3, 4, 5]
