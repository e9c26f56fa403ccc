"""Ranges: half-open here, inclusive on the wire, whatever a server makes of them."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.errors import Refused
from dz.hub.faults import TransferBroken
from dz.hub.ranges import guess, prefix, sent


class Served:
    """A file behind `get(begin, end)`."""

    def __init__(self, content: bytes) -> None:
        self.content, self.asked = content, []

    def __call__(self, begin: int, end: int) -> bytes:
        self.asked.append((begin, end))
        assert 0 <= begin < end <= len(self.content)
        return self.content[begin:end]


@settings(deadline=None)
@given(n=st.integers(2, 300), data=st.integers(0, 50), first=st.integers(0, 400))
def test_the_prefix_is_the_header_whatever_was_guessed(n, data, first):
    content = struct.pack("<Q", n) + bytes(i % 251 for i in range(n + data))
    get = Served(content)
    assert prefix(get, len(content), "x", first) == content[: 8 + n]
    assert len(get.asked) == 1 + (8 + n > max(first, 8)) and get.asked[0][0] == 0
    if len(get.asked) == 2:
        assert get.asked[1] == (max(first, 8), 8 + n)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "truncated"),
        (b"\x05\x00\x00", "truncated"),
        (struct.pack("<Q", 100) + b"x" * 50, "truncated"),
        (struct.pack("<Q", 1 << 40) + b"x" * 50, "not_safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n", "lfs_stub"),
    ],
)
def test_what_is_no_weight_file(content, code):
    with pytest.raises(Refused) as e:
        prefix(Served(content), len(content), "x.safetensors")
    assert e.value.code == code and "x.safetensors" in e.value.what


def test_guess_grows_with_the_tensors():
    names = [f"model.layers.{i}.weight" for i in range(3000)]
    assert guess(names) > sum(len(n) + 90 for n in names) and guess([]) == 64 << 10


def test_what_an_answer_says_of_itself():
    assert sent(206, {"Content-Range": "bytes 5-9/100"}) == (5, 100)
    assert sent(206, {"Content-Range": "bytes 5-9/*"}) == (5, None)
    assert sent(200, {"Content-Length": "100"}) == (0, 100)
    assert sent(200, {"Content-Length": "70", "Content-Encoding": "gzip"}) == (0, None)
    assert sent(200, {}) == (0, None)
    for text in ("", "bytes */100", "items 1-2/3"):
        with pytest.raises(TransferBroken):
            sent(206, {"Content-Range": text})
