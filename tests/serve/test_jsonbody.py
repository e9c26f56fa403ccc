"""JSON bodies: broken ones are told, answers never fail."""

import json

import pytest

from dz.serve.jsonbody import dump, load

BROKEN = [
    b"[" * 66 + b"]" * 66,
    b"", b"{", b"[1,]", b"{'a': 1}", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}', b"\xff\xfe", b'{"a": "\xff"}',
    b'{"a": "\\ud800"}', b"[" * 200_000, b"1" * 100_000, b'{"a": 1} x', b"\x00",
]  # fmt: skip


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_broken_json_has_a_readable_reason(body):
    with pytest.raises(ValueError) as e:
        load(body)
    assert 0 < len(str(e.value)) <= 200


@pytest.mark.parametrize("value", [None, 1, -1.5, "a\u0000é👩", [], {}, {"a": [1, {"b": None}]}, 2**63, -(2**63)])
def test_what_json_can_say_comes_back(value):
    assert load(json.dumps(value).encode()) == value
    assert json.loads(dump(value)) == value


def test_lone_surrogates_do_not_break_an_answer():
    assert json.loads(dump({"a\ud800": ["b\udfff", ("c", 1)]})) == {"a?": ["b?", ["c", 1]]}
