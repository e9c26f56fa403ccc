"""A local folder: registered in place, checked as a whole, and named by what is in it."""

import json
import os

import pytest

from dz.core.envelope import validate
from dz.errors import Refused, UsageError
from dz.hub import acquire, resolve
from dz.hub.acquire import Request

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path, made):
    return made.lay(tmp_path / "models" / "mine", made.model(code=True))


def fetch(folder, base, **more):
    return acquire.fetch(Request(model=str(folder), **more), workspace=base)


def refusal(folder, base):
    with pytest.raises(Refused) as e:
        fetch(folder, base)
    assert not list(base.glob("*/fetch.json"))
    return e.value


def test_registers_in_place(folder, base):
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    done = fetch(folder, base)
    validate(done.document)
    assert done.source.path == folder and done.source.name == str(folder) and done.source.commit == ""
    assert done.path == base / f"mine@{done.source.rev8}" / "fetch.json"
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    assert len(done.source.code_hash) == 64 and done.document["data"]["weights"]["tensors"] == 6
    assert fetch(folder, base).fresh and not fetch(folder, base, force=True).fresh


@pytest.mark.parametrize("cut", [1, 22, 22 + 7 * 6 * 4, 22 + 7 * 6 * 4 + 10])
def test_a_cut_shard(folder, base, cut):
    """One byte, a tensor, both tensors, and inside the header."""
    path = folder / SHARD
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    error = refusal(folder, base)
    assert error.code == "truncated" and SHARD in error.why and f"{size - cut:,}" in error.why
    assert f"{size:,}" in error.why or "header needs" in error.why


def test_all_faults_at_once(folder, base, made):
    (folder / SHARD).unlink()
    (folder / "tokenizer.json").write_bytes(made.stub)
    (folder / "config.json").write_bytes(b'{"model_type": "ma')
    (folder / "model-00001-of-00003.safetensors").write_bytes(made.stub)
    error = refusal(folder, base)
    assert error.code == "incomplete" and "1 of 3 weight files" in error.what
    assert {(f.file, f.code) for f in error.faults} == {
        (SHARD, "missing_file"),
        ("tokenizer.json", "lfs_stub"),
        ("config.json", "bad_json"),
        ("model-00001-of-00003.safetensors", "lfs_stub"),
    }
    assert "places 2 tensors" in error.why and "123,456,789" in error.why


def test_an_index_that_is_a_stub(folder, base, made):
    (folder / INDEX).write_bytes(made.stub)
    assert refusal(folder, base).code == "lfs_stub"


@pytest.mark.parametrize("change", ["extra", "missing", "renamed"])
def test_index_and_headers_disagree(folder, base, made, change):
    tensors = {"layers.1.a.weight": ("F32", (7, 6)), "layers.1.b.bias": ("BF16", (11,))}
    if change == "extra":
        tensors["layers.1.c"] = ("U8", (3,))
    else:
        tensors.pop("layers.1.b.bias")
        if change == "renamed":
            tensors["layers.1.b.bais"] = ("BF16", (11,))
    (folder / SHARD).write_bytes(made.safetensors(tensors))
    error = refusal(folder, base)
    codes = {"extra": {"extra_tensor"}, "missing": {"missing_tensor"}, "renamed": {"extra_tensor", "missing_tensor"}}
    assert {f.code for f in error.faults} == codes[change] and {f.file for f in error.faults} == {SHARD}
    names = {"extra": "layers.1.c", "missing": "layers.1.b.bias", "renamed": "layers.1.b.bais"}
    assert names[change] in error.why


def test_a_tensor_in_two_shards(folder, base, made):
    third = {
        "layers.2.a.weight": ("F32", (7, 7)),
        "layers.2.b.bias": ("BF16", (11,)),
        "layers.0.b.bias": ("BF16", (11,)),
    }
    (folder / "model-00003-of-00003.safetensors").write_bytes(made.safetensors(third))
    error = refusal(folder, base)
    assert error.code == "duplicate_tensor" and "layers.0.b.bias" in error.why


def test_strays_are_listed_and_not_read(folder, base, made):
    made.lay(folder, {"model.safetensors": b"junk", "original/x.safetensors": b"", "a.gguf": b"GGUF"})
    done = fetch(folder, base)
    assert {i["path"] for i in done.document["data"]["ignored"]} == {
        "model.safetensors",
        "original/x.safetensors",
        "a.gguf",
    }
    assert "not read" in done.document["reasons"][0]


def test_strays_neither_count_nor_have_to_be_whole(folder, base, made):
    """An unpulled pointer that nothing reads is no fault, and a stray file makes no new revision."""
    first = fetch(folder, base).source
    made.lay(folder, {"original/x.safetensors": made.stub, "pytorch_model.bin": b"x"})
    done = fetch(folder, base)
    assert not done.fresh and done.source.rev8 == first.rev8
    assert [i["path"] for i in done.document["data"]["ignored"]] == ["original/x.safetensors", "pytorch_model.bin"]


def test_a_wrong_total_size_is_noted(folder, base):
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (folder / INDEX).write_text(json.dumps(index))
    assert "claims" in " ".join(fetch(folder, base).document["reasons"])


def test_one_file_without_an_index(tmp_path, base, made):
    files = {"config.json": b"{}", "model.safetensors": made.safetensors({"a": ("F16", (3, 5))})}
    done = fetch(made.lay(tmp_path / "m", files), base)
    assert done.document["data"]["weights"] == {"index": "", "shards": ["model.safetensors"], "tensors": 1, "bytes": 30}


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "no_safetensors"),
        ({"config.json": b"{}", "deep/model.safetensors": b"x"}, "no_safetensors"),
        ({"config.json": b"{}", "m.gguf": b"x"}, "no_safetensors"),
        ({"config.json": b"{}"}, "no_weights"),
    ],
)
def test_no_weights_to_serve(tmp_path, base, made, files, code):
    assert refusal(made.lay(tmp_path / "m", files), base).code == code


def test_a_configuration_alone_resolves_but_is_not_complete(tmp_path, base, made):
    folder = made.lay(tmp_path / "m", {"config.json": b"{}"})
    assert resolve(str(folder), workspace=base).files[0].path == "config.json"
    document = json.loads(next(base.glob("*/fetch.json")).read_text())
    validate(document)
    assert document["status"] == "partial" and "no weight files" in document["reasons"]
    refusal_ = pytest.raises(Refused)
    with refusal_:
        fetch(folder, base)


def test_files_of_different_commits_are_reported(folder, base, made):
    notes = folder / ".cache" / "huggingface" / "download"
    made.lay(notes, {f"{SHARD}.metadata": b"a" * 40 + b"\netag\n", "config.json.metadata": b"b" * 40 + b"\n"})
    assert any("2 different commits" in r for r in fetch(folder, base).document["reasons"])


def test_a_dangling_link(folder, base):
    target = folder / SHARD
    target.unlink()
    target.symlink_to(folder / "gone")
    assert {f.code for f in refusal(folder, base).faults} == {"dangling"}


def test_the_revision_follows_what_counts(folder, base, made):
    def rev() -> str:
        return resolve(str(folder), workspace=base).rev8

    first = rev()
    (folder / "README.md").write_text("other words")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.json").write_text("{}")
    assert rev() == first
    seen = [first]
    changes = {
        "config.json": b'{"model_type": "made_up", "seed": 7}',
        "modeling_made_up.py": b"class Model: x = 1\n",
        "chat_template.jinja": b"{{ messages }}",
        SHARD: made.safetensors({"layers.1.a.weight": ("F32", (6, 7)), "layers.1.b.bias": ("BF16", (11,))}),
    }
    for path, content in changes.items():
        (folder / path).write_bytes(content)
        seen.append(rev())
    assert len(set(seen)) == len(seen)


def test_other_numbers_under_the_same_header_are_checked_again(folder, base):
    assert not fetch(folder, base).fresh
    assert fetch(folder, base).fresh
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    os.utime(path, ns=(1, 1_000_000_000))
    assert not fetch(folder, base).fresh


def test_the_workspace_inside_the_folder_does_not_count(folder):
    base = folder / "reports"
    first = fetch(folder, base)
    assert fetch(folder, base).fresh
    assert not [f for f in first.source.files if f.path.startswith("reports")]


def test_what_makes_no_sense_for_a_folder(folder, base, tmp_path):
    for more, code in (
        ({"include": ("*",)}, "folder_filter"),
        ({"local_dir": tmp_path}, "folder_filter"),
        ({"revision": "main"}, "folder_revision"),
    ):
        with pytest.raises(UsageError) as e:
            fetch(folder, base, **more)
        assert e.value.code == code
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        fetch(tmp_path / "empty", base)


@pytest.mark.parametrize("name", ["config.json", SHARD, "tokenizer.json"])
def test_what_is_no_regular_file_is_named_and_never_opened(folder, base, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    said = refusal(folder, base)
    assert name in said.why and "no regular file" in said.why


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_a_configuration_must_be_an_object(folder, base, name, text):
    (folder / name).write_text(text)
    said = refusal(folder, base)
    assert name in said.why and "no JSON object" in said.why
