"""`dz ls` and `dz show`."""

import json
from pathlib import Path

import pytest

from dz import hub
from dz.core.check import Result
from dz.core.envelope import validate
from dz.core.plan import Choice, Plan, SitePlan
from dz.core.source import FileEntry, Source
from dz.core.workspace import Workspace


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A locked model with a plan and a report in the workspace, found by its name."""
    source = Source(
        name="org/name",
        folder=str(tmp_path / "files"),
        commit="1" * 40,
        rev8="1" * 8,
        code_hash="",
        files=(
            FileEntry(path="config.json", size=20),
            FileEntry(path="model.safetensors", size=1_000_000, sha256="a" * 64),
        ),
    )
    place = Workspace.of(source, tmp_path / "reports")
    place.write(place.fetch, "fetch", {"source": source})
    choice = Choice(impl="rms_norm/torch", reason="preferred")
    site = SitePlan(
        site="*.norm",
        op="rms_norm",
        status="known",
        count=3,
        phases={"prefill": choice, "decode": Choice(impl="upstream", reason="no", tier="gather")},
    )
    place.write(
        place.plan,
        "plan",
        Plan(model="org/name", rev8="1" * 8, device="cpu", dtype="float32", sites=(site,), hash="abcdef0123"),
    )
    result = Result(id="text", status="fail", reason="two tokens differ", value=0.5, threshold=1.0, n=20)
    place.write(place.report("default"), "report", {"results": [result]}, status="fail")
    asked = []
    monkeypatch.setattr(
        hub, "resolve", lambda model, *, workspace, headers: asked.append((model, workspace)) or source, raising=False
    )
    return asked


def test_ls(dz, model, tmp_path):
    code, out, _ = dz("ls")
    assert code == 0
    assert out.splitlines()[1].split() == ["org/name", "11111111", "1.0", "MB", "abcdef01", "default", "fail"]
    document = json.loads(dz("ls", "--json")[1])
    validate(document)
    (row,) = document["data"]["models"]
    assert row["bytes"] == 1_000_020 and row["reports"] == {"default": "fail"} and row["inventory"] is False


def test_an_empty_workspace(dz, tmp_path):
    code, out, err = dz("ls", "--workspace", str(tmp_path / "none"))
    assert code == 0 and out.split() == ["MODEL", "REVISION", "SIZE", "PLAN", "REPORTS"]
    assert f"no models in {tmp_path / 'none'}" in err and "hint: dz fetch org/name" in err


def test_show_in_short(dz, model, tmp_path):
    code, out, _ = dz("show", "org/name@main")
    assert code == 0 and ["plan", "abcdef01"] in [line.split() for line in out.splitlines()]
    assert model == [("org/name@main", tmp_path / "reports")]
    document = json.loads(dz("show", "org/name", "--json")[1])
    validate(document)
    assert document["data"]["model"] == "org/name" and document["inputs"] == {"model": "org/name"}


def test_show_documents(dz, model, tmp_path):
    out = dz("show", "org/name", "plan")[1]
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["*.norm", "rms_norm", "3", "prefill", "rms_norm/torch", "preferred"],
        ["*.norm", "rms_norm", "3", "decode", "upstream", "(gather)", "no"],
    ]
    assert "text   FAIL    0.5" in dz("show", "org/name", "report")[1]
    assert "a" * 64 in dz("show", "org/name", "fetch")[1]
    stored = next(Path(tmp_path / "reports").glob("*/plan.json"))
    assert json.loads(dz("show", "org/name", "plan", "--json")[1]) == json.loads(stored.read_text())


def test_what_is_not_there(dz, model):
    code, out, err = dz("show", "org/name", "inventory")
    assert code == 2 and out == "" and "org/name has no inventory" in err and "next: dz adapt org/name" in err
    code, _, err = dz("show", "org/name", "report", "--checklist", "other")
    assert code == 2 and "next: dz accept org/name" in err
    code, _, err = dz("show", "org/name", "plam")
    assert code == 2 and "'plam'" in err
