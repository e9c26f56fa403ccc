"""Text that arrives token by token equals the text of the whole."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.upstream.detokenize import LOST, Detokenizer

CORPUS = ["the quick brown fox, 한국어 문장입니다. 日本語の文章。 naïve café", "👩‍👩‍👧‍👦 🏳️‍🌈 🇰🇷 e\u0301 done"]


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level BPE tokenizer; most non-ASCII characters span tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tok.train_from_iterator(CORPUS * 3, trainer)
    return tok


@pytest.fixture(scope="module")
def byte_fallback():
    """A sentencepiece-like tokenizer: <0xNN> for what it does not know, the first space is stripped."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<unk>", "▁", "▁the", "▁fox", "a", "b", "▁b", *(f"<0x{i:02X}>" for i in range(256))]
    tok = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tok


def decode_of(tok):
    return lambda ids: tok.decode(ids, skip_special_tokens=False)


def in_pieces(detokenizer, ids, cuts=()):
    """The pieces when the ids come in chunks that end at `cuts`."""
    edges = [0, *sorted(set(cuts) & set(range(1, len(ids)))), len(ids)] if cuts else range(len(ids) + 1)
    edges = list(edges)
    return [*(detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)), detokenizer.flush()]


@pytest.mark.parametrize(
    "text", ["plain words", "한국어 문장입니다.", "é", "👩‍👩‍👧‍👦🏳️‍🌈", "a\ufffdb", "naïve 日本語 🇰🇷 end"]
)
def test_each_character_once_it_is_complete(byte_level, text):
    ids = byte_level.encode(text, add_special_tokens=False).ids
    pieces = in_pieces(Detokenizer(decode_of(byte_level)), ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any(LOST in p for p in pieces)  # never cut inside a character


def test_text_is_not_held_longer_than_a_character(byte_level):
    ids = byte_level.encode("the fox 한 the fox", add_special_tokens=False).ids
    detokenizer, given_out = Detokenizer(decode_of(byte_level)), ""
    for i, token in enumerate(ids):
        given_out += detokenizer.push([token])
        whole = byte_level.decode(ids[: i + 1])
        assert whole.removesuffix(LOST) == given_out


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_in_any_chunks_byte_level(byte_level, data):
    ids = data.draw(st.lists(st.integers(1, byte_level.get_vocab_size() - 1), min_size=1, max_size=60))
    cuts = data.draw(st.lists(st.integers(1, 59)))
    pieces = in_pieces(Detokenizer(decode_of(byte_level)), ids, cuts)
    assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=False)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_in_any_chunks_byte_fallback(byte_fallback, data):
    raw = st.sampled_from([byte_fallback.token_to_id(f"<0x{b:02X}>") for b in "é한👩".encode()])
    ids = data.draw(st.lists(st.one_of(st.integers(1, 6), raw), min_size=1, max_size=40))
    cuts = data.draw(st.lists(st.integers(1, 39)))
    byte_ids = frozenset(range(7, 263))
    pieces = in_pieces(Detokenizer(decode_of(byte_fallback), byte_ids=byte_ids), ids, cuts)
    assert "".join(pieces) == byte_fallback.decode(ids, skip_special_tokens=False)


def test_invalid_bytes_flush_at_the_end(byte_level):
    first = byte_level.encode("한", add_special_tokens=False).ids[:1]
    detokenizer = Detokenizer(decode_of(byte_level))
    assert byte_level.decode(first) == LOST
    assert detokenizer.push(first) == ""
    assert detokenizer.flush() == LOST
    assert detokenizer.flush() == ""


def test_an_endless_run_of_invalid_bytes_stays_cheap(byte_level):
    bad = byte_level.encode("한", add_special_tokens=False).ids[:1]
    longest, calls = 0, 0

    def decode(ids):
        nonlocal longest, calls
        longest, calls = max(longest, len(ids)), calls + 1
        return byte_level.decode(ids, skip_special_tokens=False)

    detokenizer = Detokenizer(decode)
    out = "".join(detokenizer.push(bad) for _ in range(500)) + detokenizer.flush()
    assert out == byte_level.decode(bad * 500)
    assert longest < 100
    assert calls < 2500


def test_muted_tokens_leave_no_trace(byte_level):
    ids = byte_level.encode("한 fox", add_special_tokens=False).ids
    dirty = [0, *[t for i in ids for t in (i, 0)]]
    detokenizer = Detokenizer(decode_of(byte_level), mute={0})
    assert "".join(detokenizer.push([t]) for t in dirty) + detokenizer.flush() == "한 fox"


def test_the_first_space_of_a_window_is_kept(byte_fallback):
    ids = [2, 1, 3, 2, 0, 6, 3] * 5
    detokenizer = Detokenizer(decode_of(byte_fallback))
    assert "".join(detokenizer.push([t]) for t in ids) + detokenizer.flush() == byte_fallback.decode(
        ids, skip_special_tokens=False
    )
