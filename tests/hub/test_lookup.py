"""MODEL as people write it, and finding it by its lock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dz.errors import DzError, Refused, UsageError
from dz.hub import acquire, resolve
from dz.hub.names import near, parse


def test_parse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse("org/other@refs/pr/1").revision == "refs/pr/1"
    assert parse("org/other", "v1").text == "org/other@v1" and parse("org/other@v1", "v1").revision == "v1"
    assert parse("gpt").name == "gpt" and parse("gpt").path is None
    assert parse("here").path == tmp_path / "here" and parse("./here").name == str(tmp_path / "here")
    assert parse("org/name").path == tmp_path / "org" / "name"
    for text, revision, code in (
        ("org/name/more", None, "bad_model"),
        ("org/na me", None, "bad_model"),
        ("https://hub/org/name", None, "bad_model"),
        ("org/other@a b", None, "bad_revision"),
        ("org/other@v1", "v2", "two_revisions"),
        ("./hree", None, "no_folder"),
        ("here", "main", "folder_revision"),
    ):
        with pytest.raises(UsageError) as e:
            parse(text, revision)
        assert e.value.code == code and (text.partition("@")[2] or text) in e.value.what
    with pytest.raises(UsageError) as e:
        parse("./hree")
    assert str(tmp_path / "here") in e.value.why
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as e:
        parse("./file")
    assert e.value.code == "not_a_folder"


@settings(deadline=None)
@given(st.text(max_size=20))
@example("~nobody-here")
@example("./" + "x" * 5000)
@example("x" * 300)
@example("/\0")
@example("~\0")
def test_any_text_parses_or_is_refused(text):
    try:
        model = parse(text)
        assert model.path is not None or (model.name and ".." not in model.name)
    except DzError as e:
        assert e.exit_code == 2


def test_near_ignores_case():
    assert near("qwen/qwen9-8b", ["Qwen/Qwen9-8B", "else"]) == ["Qwen/Qwen9-8B"]


def test_resolve_finds_the_lock(hub, ask, base, made):
    first = hub.push("org/name", made.model(code=True))
    done = acquire.fetch(ask(), workspace=base)
    hub.requests.clear()
    assert resolve("org/name", workspace=base) == done.source
    for revision in (first, first[:8], "main"):
        assert resolve(f"org/name@{revision}", workspace=base) == done.source
    assert not hub.requests
    with pytest.raises(UsageError) as e:
        resolve("org/name@v2", workspace=base)
    assert e.value.code == "not_fetched" and first[:8] in e.value.why and e.value.next == "dz fetch org/name@v2"


def test_resolve_refuses_to_choose(hub, ask, base, made):
    first = hub.push("org/name", made.model())
    acquire.fetch(ask(), workspace=base)
    second = hub.push("org/name", made.model(seed=1))
    acquire.fetch(ask("org/name@main"), workspace=base)
    for model in ("org/name", "org/name@main"):  # both were asked for as main
        with pytest.raises(UsageError) as e:
            resolve(model, workspace=base)
        assert e.value.code == "ambiguous_revision"
        assert e.value.why.index(second[:8]) < e.value.why.index(first[:8])
    assert resolve(f"org/name@{first[:8]}", workspace=base).commit == first


def test_resolve_suggests_near_names(hub, ask, base, made):
    hub.push("Org/Great-Model", made.model())
    acquire.fetch(ask("Org/Great-Model"), workspace=base)
    with pytest.raises(UsageError) as e:
        resolve("org/great-modle", workspace=base)
    assert "Org/Great-Model" in e.value.why and e.value.next == "dz fetch org/great-modle"


@pytest.mark.parametrize("what", ["gone", "grown", "written"])
def test_resolve_refuses_files_that_changed(hub, ask, base, made, what):
    hub.push("org/name", made.model())
    path = acquire.fetch(ask(), workspace=base).source.path / "config.json"
    content = path.read_bytes()
    if what == "gone":
        path.unlink()
    else:
        path.resolve().write_bytes(content + b" " if what == "grown" else content)
    with pytest.raises(Refused) as e:
        resolve("org/name", workspace=base)
    assert e.value.code == "changed" and "config.json" in e.value.why
    acquire.fetch(ask(), workspace=base)
    resolve("org/name", workspace=base)


def test_a_folder_and_a_repository_of_one_name(hub, ask, base, made, tmp_path, monkeypatch):
    hub.push("org/name", made.model())
    done = acquire.fetch(ask(), workspace=base)
    made.lay(tmp_path / "cwd" / "org" / "name", made.model(seed=3))
    monkeypatch.chdir(tmp_path / "cwd")
    with pytest.raises(UsageError) as e:
        resolve("org/name", workspace=base)
    assert e.value.code == "ambiguous_model"
    assert resolve("./org/name", workspace=base).commit == ""
    assert resolve(f"org/name@{done.source.rev8}", workspace=base).commit == done.source.commit


def test_a_spoilt_lock_is_named(hub, ask, base, made):
    hub.push("org/name", made.model())
    path = acquire.fetch(ask(), workspace=base).path
    for text, code in (
        ("{", "bad_json"),
        ("{}", "error"),
        (json.dumps({"schema": "dz.fetch/1", "data": {}}), "bad_document"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError) as e:
            resolve("org/name", workspace=base)
        assert e.value.code == code and str(path) in e.value.what


def test_no_torch_and_no_hub_client_to_find_a_lock(base, made, tmp_path):
    folder = made.lay(tmp_path / "m", made.model())
    text = (
        "import sys; from pathlib import Path; import dz.hub\n"
        f"source = dz.hub.resolve({str(folder)!r}, workspace=Path({str(base)!r}))\n"
        "print(source.rev8, [m for m in ('torch', 'transformers', 'huggingface_hub', 'httpx') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=Path(acquire.__file__).parents[2]
    )
    assert out.stdout.split(maxsplit=1) == [resolve(str(folder), workspace=base).rev8, "[]\n"], out.stderr


def test_no_exported_name_is_also_a_file():
    """Importing a submodule would put the module where the function was."""
    import dz.hub

    files = {p.stem for p in Path(dz.hub.__file__).parent.glob("*.py")}
    assert not files & set(dz.hub.__all__)
    assert all(getattr(dz.hub, name).__name__ == name for name in dz.hub.__all__)
    with pytest.raises(AttributeError):
        _ = dz.hub.nothing
