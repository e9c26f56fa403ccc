"""Recipes and checklists: by name, by path, with keys checked."""

import pytest

from dz.core import library
from dz.core.check import load_checklist
from dz.core.recipe import load_recipe
from dz.errors import UsageError


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Two $DZ_PATH folders that hold recipes."""
    for name in ("one", "two"):
        (tmp_path / name / "recipes").mkdir(parents=True)
        (tmp_path / name / "recipes/made_up.yaml").write_text(f"summary: {name}\n")
    (tmp_path / "two/recipes/zebra.yaml").write_text("summary: only in two\n")
    monkeypatch.setenv("DZ_PATH", f"{tmp_path / 'one'}:{tmp_path / 'two'}:{tmp_path / 'none'}")
    return tmp_path


def test_names(outside):
    got = library.entries("recipes")
    assert {"made_up", "zebra"} <= set(got) and list(got) == sorted(got)
    assert load_recipe(got["made_up"]).summary == "one"


def test_find(outside, monkeypatch):
    assert library.find("recipes", "zebra") == outside / "two/recipes/zebra.yaml"
    assert library.find("recipes", str(outside / "one/recipes/made_up.yaml")) == outside / "one/recipes/made_up.yaml"
    monkeypatch.chdir(outside / "two/recipes")
    assert library.find("recipes", "./zebra.yaml").is_file()
    assert library.find("recipes", "zebra.yaml").is_file()
    with pytest.raises(UsageError) as e:
        library.find("recipes", "zebar")
    assert "did you mean 'zebra'?" in e.value.why and e.value.next == "dz recipes ls"
    with pytest.raises(UsageError, match=r"no file at \./none\.yaml"):
        library.find("recipes", "./none.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not valid YAML"),
        ("- a", "holds no mapping"),
        ("matchs: []", "did you mean matches?"),
        ("require: {op: {}}", "did you mean require.ops?"),
        ("prefer: {setting: {}}", "prefer.setting"),
        ("matches: five", "is not a valid Recipe"),
        ("require: {ops: {rms_norm: 3}}", "is not a valid Recipe"),
    ],
)
def test_bad_recipes(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as e:
        load_recipe(path)
    said = " ".join(e.value.lines())
    assert words in said and str(path) in said


def test_a_recipe(tmp_path):
    path = tmp_path / "fam.yaml"
    path.write_text(
        "matches: [fam_*]\nrequire: {ops: {rms_norm: [triton, torch]}}\nprefer: {settings: {block_size: 32}}\n"
    )
    got = load_recipe(path)
    assert (got.name, got.matches, got.path) == ("fam", ["fam_*"], str(path))
    assert got.require.ops == {"rms_norm": ["triton", "torch"]} and got.prefer.settings == {"block_size": 32}
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert load_recipe(empty).name == "empty" and load_recipe(empty).matches == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("checks: [{chek: load}]", "did you mean check?"),
        ("checks: [{check: load}, {check: load}]", "names load twice"),
        ("checks: [{check: a, id: b}, {check: b}]", "names b twice"),
        ("checks: [{id: a}]", "is not a valid Checklist"),
        ("sumary: x", "did you mean summary?"),
        ("checks: [load]", "is not a valid Checklist"),
        ("checks: 3", "'checks' is a int"),
    ],
)
def test_bad_checklists(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as e:
        load_checklist(path)
    assert words in " ".join(e.value.lines())


def test_a_checklist(tmp_path):
    path = tmp_path / "brief.yaml"
    path.write_text("checks:\n- check: load\n- {check: text, id: long, required: false, params: {n: 3}}\n")
    got = load_checklist(path)
    assert [(c.name, c.check, c.required, c.params) for c in got.checks] == [
        ("load", "load", True, {}),
        ("long", "text", False, {"n": 3}),
    ]


@pytest.mark.parametrize("kind", ["recipes", "checklists"])
def test_what_ships_is_valid(kind):
    load = {"recipes": load_recipe, "checklists": load_checklist}[kind]
    for name, path in library.entries(kind).items():
        got = load(path)
        assert got.name == name and got.summary, path
