"""The safetensors header: property tests against the format, and everything a broken file can be."""

import json
import struct
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.core.headers import BITS, MAX_HEADER, Header, header_length, lfs_stub, parse_header, read_header
from dz.errors import Refused

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(
    lambda n: n != "__metadata__"
)
TENSORS = st.dictionaries(
    NAMES, st.tuples(st.sampled_from(sorted(BITS)), st.lists(st.integers(0, 5), max_size=3)), max_size=6
)


def build(tensors: dict, *, metadata: dict | None = None, pad: int = 0) -> tuple[bytes, int]:
    """(header JSON, data bytes) of tensors laid one after the other in the order given."""
    header, at = ({"__metadata__": metadata} if metadata else {}), 0
    for name, (dtype, shape) in tensors.items():
        size = (prod(shape) * BITS[dtype] + 7) // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return json.dumps(header, ensure_ascii=False).encode() + b" " * pad, at


def write(path, raw: bytes, data: int):
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data))
    return path


@settings(deadline=None)
@given(TENSORS, st.integers(0, 9), st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
def test_round_trip(tensors, pad, metadata):
    raw, size = build(tensors, metadata=metadata, pad=pad)
    header = parse_header(raw, "x")
    assert {n: (t.dtype, list(t.shape)) for n, t in header.tensors.items()} == {
        n: (d, list(s)) for n, (d, s) in tensors.items()
    }
    assert header.metadata == metadata
    assert header.expected_size == 8 + len(raw) + size
    assert sum(t.bytes for t in header.tensors.values()) == size
    assert all(t.elements == prod(t.shape) for t in header.tensors.values())


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(raw):
    try:
        assert isinstance(parse_header(raw, "x"), Header)
    except Refused as e:
        assert e.code == "bad_header" and "x" in e.what


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(JSON, JSON, JSON)
def test_any_json_parses_or_is_refused(dtype, shape, offsets):
    entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    for value in ({"t": entry}, {"t": dtype}, {"__metadata__": dtype}, entry, shape):
        try:
            parse_header(json.dumps(value).encode(), "x")
        except Refused as e:
            assert e.code == "bad_header"


@settings(deadline=None)
@given(TENSORS.filter(lambda t: any(prod(s) for _, s in t.values())), st.data())
def test_shifted_offsets_are_refused(tensors, data):
    """Any gap, overlap or wrong length: offsets that do not tile the data section exactly."""
    raw, _ = build(tensors)
    header = json.loads(raw)
    name = data.draw(st.sampled_from([n for n, (d, s) in tensors.items() if prod(s)]))
    side = data.draw(st.sampled_from([0, 1, 2]))
    step = data.draw(st.integers(1, 9))
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin + step * (side != 1), end + step * (side != 0)]
    with pytest.raises(Refused):
        parse_header(json.dumps(header).encode(), "x")


def test_a_name_twice():
    one = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    with pytest.raises(Refused) as e:
        parse_header(f'{{"a":{one},"a":{one}}}'.encode(), "x")
    assert "'a'" in e.value.why


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"t":{"dtype":["F32"],"shape":[],"data_offsets":[0,4]}}', b'{"t":' + b"1" * 5000 + b"}"]
)
def test_nesting_without_end_and_other_oddities(raw):
    with pytest.raises(Refused):
        parse_header(raw, "x")


@pytest.mark.parametrize("n", [0, 1, MAX_HEADER + 1, 2**63])
def test_lengths_that_are_none(n):
    with pytest.raises(Refused) as e:
        header_length(struct.pack("<Q", n), "x")
    assert e.value.code == "not_safetensors" and str(n) in e.value.why


@pytest.fixture
def good(tmp_path):
    raw, size = build({"a": ("F32", (7, 5)), "b": ("BF16", (3,)), "empty": ("F32", (0, 4))}, pad=3)
    return write(tmp_path / "m.safetensors", raw, size)


def test_reads_a_file(good):
    header = read_header(good)
    assert list(header.tensors) == ["a", "b", "empty"]
    assert header.expected_size == good.stat().st_size == header.data_start + 7 * 5 * 4 + 6


@pytest.mark.parametrize("length", [93, 94, 99_993, 99_994, 100_000, 100_001])
def test_header_lengths_at_the_edges_of_a_range_read(tmp_path, length):
    raw, size = build({"a": ("F32", (7, 5))})
    path = write(tmp_path / "m.safetensors", raw.ljust(length), size)
    assert read_header(path).header_bytes == length


@pytest.mark.parametrize("cut", [1, 6, 7 * 5 * 4 + 6])  # a byte, a tensor, all the data
def test_cut_data(good, cut):
    size = good.stat().st_size
    good.write_bytes(good.read_bytes()[:-cut])
    with pytest.raises(Refused) as e:
        read_header(good)
    assert e.value.code == "truncated" and good.name in e.value.what
    assert f"{size:,}" in e.value.why and f"{size - cut:,}" in e.value.why


@given(at=st.integers(0, 150))
@settings(max_examples=40, deadline=None)
def test_cut_anywhere_inside_the_header(tmp_path_factory, at):
    raw, size = build({"a": ("F32", (7, 5)), "b": ("BF16", (3,)), "c": ("I64", (2, 2))})
    path = write(tmp_path_factory.mktemp("cut") / "m.safetensors", raw, size)
    path.write_bytes(path.read_bytes()[:at])
    with pytest.raises(Refused) as e:
        read_header(path)
    assert e.value.code == "truncated"


def test_bytes_too_many(good):
    good.write_bytes(good.read_bytes() + b"\0")
    with pytest.raises(Refused) as e:
        read_header(good)
    assert e.value.code == "wrong_size" and "1 bytes too long" in e.value.what


def test_lfs_pointer(tmp_path):
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
    path = tmp_path / "m.safetensors"
    path.write_bytes(text)
    assert lfs_stub(path) == 4976698672
    with pytest.raises(Refused) as e:
        read_header(path)
    assert e.value.code == "lfs_stub" and "4,976,698,672" in e.value.why and "LFS pointer" in e.value.what
    path.write_bytes(text.replace(b"size", b"seize"))
    assert lfs_stub(path) == 0
    path.write_bytes(b"version 2\n" + text)
    assert lfs_stub(path) is None
    assert lfs_stub(tmp_path) is None
