"""A header without its file: what was kept of it, and the length that the file has elsewhere."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.core.headers import parse_header, read_kept, source_header
from dz.core.source import FileEntry, Source
from dz.errors import Refused


def kept(tmp_path, tensors=((3, 5), (11,)), extra=b""):
    """(where a header is kept, the length of its file)."""
    header, at = {}, 0
    for i, shape in enumerate(tensors):
        n = 4
        for s in shape:
            n *= s
        header[f"t{i}"] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    raw = json.dumps(header).encode()
    path = tmp_path / "headers" / "x.safetensors.header"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + extra)
    return path, 8 + len(raw) + at


def source(tmp_path, size, headers=True):
    files = (FileEntry(path="x.safetensors", size=size), FileEntry(path="config.json", size=2))
    where = str(tmp_path / "headers") if headers else ""
    return Source(
        name="org/name", folder=str(tmp_path), commit="0" * 40, rev8="0" * 8, code_hash="", files=files, headers=where
    )


def test_it_reads_as_the_file_would(tmp_path):
    path, size = kept(tmp_path)
    header = read_kept(path, size, "x.safetensors")
    assert header.expected_size == size and [t.shape for t in header.tensors.values()] == [(3, 5), (11,)]
    assert source_header(source(tmp_path, size), "x.safetensors") == header


@pytest.mark.parametrize(("by", "code"), [(-1, "truncated"), (1, "wrong_size"), (-10_000, "truncated")])
def test_the_listed_length_has_to_fit(tmp_path, by, code):
    path, size = kept(tmp_path)
    with pytest.raises(Refused) as e:
        read_kept(path, max(size + by, 0), "x.safetensors")
    assert e.value.code == code and "x.safetensors" in e.value.what and f"{max(size + by, 0):,}" in e.value.why


def test_a_kept_header_that_was_cut(tmp_path):
    path, size = kept(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Refused) as e:
        read_kept(path, size, "x.safetensors")
    assert e.value.code == "truncated"


def test_where_a_file_lies(tmp_path):
    path, size = kept(tmp_path)
    here = source(tmp_path, size)
    assert here.at("x.safetensors") == path and here.header_only("x.safetensors")
    assert here.at("config.json") == tmp_path / "config.json" and not here.header_only("config.json")
    whole = source(tmp_path, size, headers=False)
    assert whole.at("x.safetensors") == tmp_path / "x.safetensors"
    for missing in ("y.safetensors", "x.safetensors"):
        with pytest.raises(FileNotFoundError):
            source_header(whole, missing)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=5).filter(lambda x: len(set(x)) < len(x)))
def test_a_name_given_twice_is_named(names):
    text = ",".join(f'"{n}": {{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}' for n in names)
    with pytest.raises(Refused) as e:
        parse_header(f"{{{text}}}".encode(), "x")
    second = next(n for i, n in enumerate(names) if n in names[:i])
    assert repr(second) in e.value.why
