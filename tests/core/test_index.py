"""Which files hold the weights, and an index against headers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.core.headers import parse_header
from dz.core.index import INDEX, Layout, broken, choose, is_weight, parse_index, safe_path, shard_faults
from dz.errors import Refused


def index(weight_map, total=None):
    return json.dumps({"metadata": {"total_size": total} if total else {}, "weight_map": weight_map}).encode()


def nothing(path):
    raise AssertionError(f"{path} was read")


def test_an_index_wins_over_every_other_file():
    raw = index({"b": "s2.safetensors", "a": "s1.safetensors"}, 12)
    strays = ["model.safetensors", "original/x.safetensors", "pytorch_model.bin", "sub/model.safetensors.index.json"]
    layout = choose(["config.json", INDEX, "s1.safetensors", "s2.safetensors", *strays], {INDEX: raw}.__getitem__)
    assert layout.index == INDEX and layout.shards == ("s1.safetensors", "s2.safetensors")
    assert set(layout.ignored) == set(strays) and layout.total_size == 12
    assert layout.by_shard() == {"s1.safetensors": {"a"}, "s2.safetensors": {"b"}}


def test_without_index():
    assert choose(["model.safetensors", "other.safetensors"], nothing).shards == ("model.safetensors",)
    only = choose(["weights.safetensors", "deep/model.safetensors"], nothing)
    assert only.shards == ("weights.safetensors",) and set(only.ignored) == {"deep/model.safetensors"}
    none = choose(["config.json", "a.bin"], nothing)
    assert none.shards == () and set(none.ignored) == {"a.bin"}
    with pytest.raises(Refused) as e:
        choose(["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], nothing)
    assert e.value.code == "no_index"


def test_several_indexes():
    a, b = "a.safetensors.index.json", "b.safetensors.index.json"
    raw = index({"t": "s.safetensors"})
    assert choose([a, INDEX, b], {INDEX: raw}.__getitem__).ignored.keys() == {a, b}
    assert choose([a, "deep/" + b], {a: raw}.__getitem__).index == a
    with pytest.raises(Refused) as e:
        choose([a, b], nothing)
    assert e.value.code == "ambiguous_index" and a in e.value.why and b in e.value.why


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": "/etc/x.safetensors"}}',
        b'{"weight_map": {"a": "../x.safetensors"}}',
        b'{"weight_map": {"a": "x.bin"}}',
        b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        b"\xff",
    ],
)
def test_broken_indexes(raw):
    with pytest.raises(Refused) as e:
        parse_index(raw, "the.index.json")
    assert e.value.code == "bad_index" and "the.index.json" in e.value.what


@settings(deadline=None)
@given(st.binary(max_size=80) | st.text(max_size=30).map(lambda t: json.dumps({"weight_map": {"a": t}}).encode()))
def test_an_index_parses_or_is_refused(raw):
    try:
        weight_map, _ = parse_index(raw, "x")
        assert all(safe_path(s) for s in weight_map.values())
    except Refused as e:
        assert e.code == "bad_index"


NAMES = st.sets(st.sampled_from("abcdefgh"), max_size=6)


@settings(deadline=None)
@given(here=NAMES, there=NAMES, header=NAMES)
def test_index_and_header_both_ways(here, there, header):
    """Silent exactly when the header holds what the index places in this shard; else every difference is counted."""
    there -= here
    weight_map = {**dict.fromkeys(here, "one"), **dict.fromkeys(there, "two")}
    layout = Layout(index=INDEX, shards=("one", "two"), weight_map=weight_map)
    raw = {n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(sorted(header))}
    faults = {
        f.code: f.text
        for f in shard_faults("one", parse_header(json.dumps(raw).encode(), "one"), layout, layout.by_shard())
    }
    expected = {
        "missing_tensor": here - header,
        "extra_tensor": header - here - there,
        "duplicate_tensor": header & there,
    }
    assert set(faults) == {code for code, names in expected.items() if names}
    for code, text in faults.items():
        assert str(len(expected[code])) in text and min(expected[code]) in text


def test_the_refusal_names_what_is_missing():
    from dz.core.index import Fault

    gone = [Fault(file=f"s{i}.safetensors", code="missing_file", text="missing") for i in range(12)]
    error = broken("org/name", gone, "dz fetch org/name", shards=40)
    assert error.code == "incomplete" and "12 of 40 weight files of org/name" in error.what
    assert "s9" in error.why and "2 more" in error.why and len(error.data()["faults"]) == 12
    other = broken("org/name", [Fault(file="README.md", code="missing_file", text="gone")], "x", shards=40)
    assert other.what == "incomplete download: 1 files of org/name are missing"
    one = broken("org/name", [Fault(file="t", code="lfs_stub", text="a pointer")], "x")
    assert one.code == "lfs_stub" and one.what == "org/name has 1 fault in 1 file"


def test_weight_endings():
    assert is_weight("a/b.gguf") and is_weight("x.safetensors") and not is_weight("tokenizer.model")


@pytest.mark.parametrize("total", ["-Infinity", "Infinity", "NaN", "1e400"])
def test_a_total_without_bounds_is_a_broken_index(total):
    raw = b'{"metadata": {"total_size": %s}, "weight_map": {"a": "s.safetensors"}}' % total.encode()
    with pytest.raises(Refused) as e:
        parse_index(raw, INDEX)
    assert e.value.code == "bad_index"


def test_half_a_character_is_no_file_name():
    assert not safe_path("\ud800.safetensors")
    with pytest.raises(Refused) as e:
        parse_index(b'{"weight_map": {"a": "\\ud800.safetensors"}}', INDEX)
    assert e.value.code == "bad_index"
