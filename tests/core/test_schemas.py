"""Every schema that ships is a valid schema, named after the document kind it describes."""

import json
from pathlib import Path

import jsonschema
import pytest

from dz.core.envelope import SCHEMAS, envelope, validate

FILES = sorted(SCHEMAS.glob("*.json"))


def test_there_are_schemas():
    assert {"fetch", "error"} <= {f.stem for f in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_is_a_valid_schema(path: Path):
    schema = json.loads(path.read_text("utf-8"))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema"] == {"const": f"dz.{path.stem}/1"}
    for ref in _refs(schema):
        assert ref.startswith("#/$defs/") and ref.removeprefix("#/$defs/") in schema["$defs"], ref


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_refuses_an_empty_document(path: Path):
    with pytest.raises(jsonschema.ValidationError):
        validate({"schema": f"dz.{path.stem}/1"})


def test_only_grows():
    """A reader of /1 must accept what a later dz adds: no schema forbids unknown keys at the top."""
    for path in FILES:
        assert json.loads(path.read_text("utf-8")).get("additionalProperties", True) is True, path


def test_an_envelope_is_plain_json():
    doc = envelope("fetch", {"a": (1, (2,)), "b": {3}}, inputs={"c": ("d",)})
    assert json.loads(json.dumps(doc)) == doc
    assert doc["data"] == {"a": [1, [2]], "b": [3]} and doc["inputs"] == {"c": ["d"]}


def _refs(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from _refs(value)
    elif isinstance(node, list):
        for item in node:
            yield from _refs(item)
