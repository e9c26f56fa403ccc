"""`dz ops|kernels|recipes|checklists`."""

import json

import pytest

from dz.core.envelope import validate
from dz.core.registry import Registry

RECIPE = """
summary: for a made-up family
matches: [made_up_*]
require:
  ops: {rms_norm: reference}
prefer:
  settings: {block_size: 32}
"""
CHECKLIST = """
summary: two checks
checks:
  - check: integrity
  - check: text
    id: text-short
    required: false
    params: {n: 4}
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A $DZ_PATH folder with a recipe, a checklist and kernels, one of which cannot be imported."""
    root = tmp_path / "outside"
    for path, text in {
        "recipes/made_up.yaml": RECIPE,
        "checklists/brief.yaml": CHECKLIST,
    }.items():
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text)
    monkeypatch.setenv("DZ_PATH", str(root))
    return root


def document(dz, *argv: str) -> dict:
    code, out, _ = dz(*argv, "--json")
    assert code == 0
    got = json.loads(out)
    validate(got)
    return got["data"]


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def test_ops(dz, registry):
    code, out, _ = dz("ops", "ls")
    assert code == 0 and {line.split()[0] for line in out.splitlines()[1:]} == set(registry.ops)
    assert {o["name"] for o in document(dz, "ops", "ls")["ops"]} == set(registry.ops)
    assert dz("ops")[1] == out


def test_one_op(dz, registry):
    op = registry.ops["rms_norm"]
    code, out, _ = dz("ops", "show", "rms_norm")
    assert code == 0 and op.summary in out
    got = document(dz, "ops", "show", "rms_norm")
    assert [a["name"] for a in got["arguments"]] == list(op.signature.parameters)
    assert {a["name"] for a in got["arguments"] if a["default"] is None} == {
        p.name for p in op.signature.parameters.values() if p.default is p.empty
    }
    assert set(got["tolerance"]) == set(op.tolerance)
    assert got["kernels"] == [k.key for k in registry.of("rms_norm")] != []


def test_an_unknown_op_suggests_the_nearest(dz):
    code, out, err = dz("ops", "show", "rms_nrom")
    assert code == 2 and out == "" and "did you mean 'rms_norm'?" in err and "next: dz ops ls" in err


def test_kernels(dz, registry):
    rows = document(dz, "kernels", "ls")["kernels"]
    assert [r["key"] for r in rows if r["status"] == "available"] == sorted(registry.kernels)
    out = dz("kernels", "ls")[1]
    assert all(key in out for key in registry.kernels)
    key = sorted(registry.kernels)[0]
    got = document(dz, "kernels", "show", key)
    assert got["key"] == key and got["file"].endswith(f"{key}.py")
    assert key in dz("kernels", "show", key)[1]


def test_a_kernel_that_cannot_be_loaded_is_listed_with_its_reason(dz, monkeypatch):
    def discover(cls):
        found = cls()
        found.unavailable["rms_norm/broken"] = "ImportError: no such library"
        return found

    monkeypatch.setattr(Registry, "discover", classmethod(discover))
    assert document(dz, "kernels", "ls")["kernels"] == [
        {"key": "rms_norm/broken", "status": "unavailable", "reason": "ImportError: no such library"}
    ]
    out = dz("kernels", "ls")[1]
    assert "rms_norm/broken  unavailable" in out and "no such library" in out
    code, _, err = dz("kernels", "show", "rms_norm/broken")
    assert code == 2 and "no such library" in err


def test_recipes(dz, outside):
    rows = [line.split(maxsplit=2) for line in dz("recipes", "ls")[1].splitlines()]
    assert ["made_up", "made_up_*", "for a made-up family"] in rows
    assert "made_up" in {r["name"] for r in document(dz, "recipes", "ls")["recipes"]}
    assert dz("recipes", "show", "made_up")[1] == RECIPE.rstrip() + "\n"
    got = document(dz, "recipes", "show", str(outside / "recipes/made_up.yaml"))
    assert got["require"]["ops"] == {"rms_norm": "reference"} and got["prefer"]["settings"] == {"block_size": 32}
    code, _, err = dz("recipes", "show", "made_pu")
    assert code == 2 and "did you mean 'made_up'?" in err


def test_a_broken_recipe_is_named(dz, outside):
    (outside / "recipes/made_up.yaml").write_text("requires: {}\n")
    for argv in (["recipes", "ls"], ["recipes", "show", "made_up"]):
        code, _, err = dz(*argv)
        assert code == 2 and "made_up.yaml has the unknown key 'requires'" in err


def test_checklists(dz, outside):
    assert "brief" in {c["name"] for c in document(dz, "checklists", "ls")["checklists"]}
    out = dz("checklists", "show", "brief")[1]
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["integrity", "integrity", "yes"],
        ["text-short", "text", "no", "n=4"],
    ]
    got = document(dz, "checklists", "show", "brief")
    assert [c["required"] for c in got["checks"]] == [True, False]
    assert dz("checklists", "ls", "-q")[1] == ""
