"""The vocabulary as JSON: what is written is read back equal, and a broken write leaves the old file."""

import json
import re
from datetime import datetime

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dz
from dz.core import jsonio
from dz.core.check import Checklist, Entry, Result
from dz.core.device import Device
from dz.core.envelope import envelope, validate
from dz.core.inventory import Arg, Binding, Coverage, Inventory, Mixer, Site, WeightFile
from dz.core.plan import Choice, MemoryRow, Plan, Rejected, SitePlan, Verified
from dz.core.source import FileEntry, Source
from dz.core.workspace import Workspace, root
from dz.errors import UsageError

SITE = Site(
    id="layers.*.norm",
    kind="module",
    cls="Norm",
    where="modeling.py:10",
    members=("layers.0.norm", "layers.1.norm"),
    status="variant",
    op="rms_norm",
    reason="offset",
    differs=("offset 1",),
    traits={"eps": 1e-6},
    binding=Binding(
        args=(Arg(name="weight", source="parameter", path="weight"), Arg(name="eps", source="constant", value=1e-6))
    ),
    shapes={"weight": (64,)},
    parameters=128,
    bytes=512,
    mixer=Mixer(kind="attention", layers=(0, 1), state="kv", tiers=("isolate", "gather"), reason="has a cache"),
)
CHOICE = Choice(
    impl="rms_norm/triton",
    reason="preferred",
    tier="gather",
    rejected=(Rejected(impl="rms_norm/torch", reason="slower"),),
    verified=Verified(level="op", max_err=1e-7, tol="atol 1e-6", cases=12),
)
VALUES = [
    SITE,
    Inventory(
        model="org/name",
        rev8="12345678",
        cls="Model",
        runs="repository",
        code_hash="ab",
        model_type="made_up",
        dtype="bfloat16",
        config={"a": [1, None]},
        layers=2,
        modalities=("text",),
        max_positions=64,
        sites=(SITE,),
        parameters=128,
        bytes=512,
        files=(WeightFile(path="model.safetensors", size=9, tensors=3),),
        notes=("n",),
        formats={"BF16": 3},
        coverage=Coverage(matched=3, missing=("x",), ignored={"y": 4}, ignored_by={"y": "recipe"}, tied=("z",)),
    ),
    Plan(
        model="org/name",
        rev8="12345678",
        device="cpu",
        dtype="float32",
        memory=(MemoryRow(name="weights", bytes=512),),
        sites=(SitePlan(site="layers.*.norm", op="rms_norm", status="known", count=2, phases={"prefill": CHOICE}),),
        inputs={"recipe": "ab"},
        hash="cd",
        broken_requirements=("rms_norm",),
    ),
    Source(name="/a/b", folder="/a/b", commit="", rev8="12345678", code_hash="", files=(FileEntry(path="f", size=1),)),
    Result(
        id="text",
        status="fail",
        reason="differs",
        value=0.5,
        threshold="1",
        n=3,
        evidence=("evidence/x.json",),
        details={"k": 1},
    ),
    Checklist(name="c", checks=(Entry(check="text", params={"n": 3}),)),
    Device(kind="cuda", name="x", arch=90, count=8, flops={"bfloat16": 1e15}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_round_trip(value, tmp_path):
    path = tmp_path / "deep/value.json"
    jsonio.write(path, value)
    assert jsonio.from_builtins(type(value), jsonio.read(path)) == value
    assert [p.name for p in path.parent.iterdir()] == ["value.json"]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_documents_only_grow(value):
    data = {**jsonio.to_builtins(value), "added_later": [1]}
    assert jsonio.from_builtins(type(value), data) == value


@pytest.mark.parametrize(
    ("data", "words"), [({}, "missing required field"), ({"name": 3}, "Expected `str`"), ([], "Expected `object`")]
)
def test_a_wrong_document_is_refused(data, words):
    with pytest.raises(UsageError) as e:
        jsonio.from_builtins(Checklist, data, where="plan.json")
    assert e.value.what == "plan.json is not a valid Checklist" and words in e.value.why


def test_not_json(tmp_path):
    path = tmp_path / "x.json"
    for raw in (b"{", b"", b"\xff"):
        path.write_bytes(raw)
        with pytest.raises(UsageError, match="is not JSON"):
            jsonio.read(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    jsonio.write(path, {"a": 1})

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space"):
        jsonio.write(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["x.json"]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_dumps_is_json(value):
    text = jsonio.dumps(value)
    assert json.loads(text) == value and text.endswith("\n")


def test_envelope():
    doc = envelope("version", {"version": "1"}, inputs={"a": (1,)}, status="ok", reasons=["r"])
    assert doc["schema"] == "dz.version/1" and doc["dz"] == dz.__version__ and doc["inputs"] == {"a": [1]}
    assert datetime.fromisoformat(doc["created"]).utcoffset().total_seconds() == 0
    validate(doc)
    for key in doc:
        with pytest.raises(jsonschema.ValidationError):
            validate({k: v for k, v in doc.items() if k != key})
    with pytest.raises(jsonschema.ValidationError, match="made_up"):
        validate({**doc, "schema": "dz.made_up/1"})


def test_device_spec():
    assert Device(kind="cpu", name="x").spec == "cpu"
    assert Device(kind="cuda", name="x", arch=90).spec == "cuda:sm90"
    assert Device(kind="cuda", name="x", arch=90, count=8).spec == "cuda:sm90 x8"
    assert Device(kind="rocm", name="x", count=2).spec == "rocm x2"


def test_workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("DZ_WORKSPACE", str(tmp_path / "w"))
    assert root() == tmp_path / "w"
    monkeypatch.setenv("DZ_WORKSPACE", "")
    monkeypatch.chdir(tmp_path)
    assert root() == tmp_path / "reports"
    source = Source(name="org/name", folder="/f", commit="1" * 40, rev8="1" * 8, code_hash="", files=())
    place = Workspace.of(source, tmp_path)
    assert place.folder == tmp_path / "org--name@11111111"
    doc = place.write(place.plan, "plan", {"a": 1}, status="ok")
    assert jsonio.read(tmp_path / "org--name@11111111/plan.json") == doc and doc["schema"] == "dz.plan/1"
    assert place.report("default") == place.folder / "default/report.json"
    assert place.evidence("default").parent == place.report("default").parent


def test_a_local_folder_goes_by_its_last_part():
    source = Source(name="/data/my model", folder="/data/my model", commit="", rev8="1" * 8, code_hash="", files=())
    assert source.workspace_name == "my model@11111111"


def test_plan_and_inventory_views():
    plan = next(v for v in VALUES if isinstance(v, Plan))
    assert [s.site for s in plan.swaps()] == ["layers.*.norm"]
    inventory = next(v for v in VALUES if isinstance(v, Inventory))
    assert (inventory.count("variant"), inventory.count("known")) == (1, 0)
    assert not inventory.coverage.complete and Coverage(matched=2, ignored={"a": 1}).complete


def test_version_has_the_form_of_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", dz.__version__)
