"""`dz fetch --metadata`: headers without weights, and what can be done with them."""

import json
from pathlib import Path

import pytest

from dz.core.envelope import validate
from dz.errors import EnvironmentFailure, Refused, UsageError
from dz.hub import acquire, audit, resolve
from dz.weights import open_checkpoint
from dz.weights.table import read_table

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def small_steps(monkeypatch):
    """Headers are asked for in steps as small as the made-up files need to show the steps."""
    monkeypatch.setattr("dz.hub.metadata.guess", lambda names: 16)


def fetch(request, base, progress=None):
    return acquire.fetch(request, workspace=base, progress=progress)


def ranges(hub, path):
    return [r.range for r in hub.content_gets() if r.path.endswith(path) and "/cdn/" in r.path]


def test_headers_and_all_small_files_but_no_weights(hub, ask, base, made):
    files = made.model(code=True) | {"assets/picture.png": b"p" * 999, "pytorch_model.bin": b"x" * 50}
    commit = hub.push("org/name", files)
    done = fetch(ask(metadata=True), base)
    validate(done.document)
    data = done.document["data"]
    assert done.document["status"] == "partial" and not data["complete"] and not data["hashed"]
    assert "headers only: 3 weight files" in " ".join(done.document["reasons"])
    assert data["weights"]["tensors"] == 6
    sizes = {f.path: f.size for f in done.source.files}
    assert sizes[SHARD] == len(files[SHARD]) and "assets/picture.png" not in sizes
    there = {p.name for p in done.source.path.iterdir()}
    assert there == {INDEX, "config.json", "tokenizer.json", "modeling_made_up.py"}
    assert done.source.code_hash and done.source.commit == commit
    kept = done.source.at(SHARD).read_bytes()
    assert files[SHARD].startswith(kept) and len(kept) < len(files[SHARD])
    hub.requests.clear()
    assert fetch(ask(metadata=True), base).fresh and not hub.requests


def test_the_table_of_headers_equals_that_of_the_files(hub, ask, base, made, tmp_path):
    files = made.model()
    hub.push("org/name", files)
    fetch(ask(metadata=True), base)
    table = read_table(resolve("org/name", workspace=base, headers=True))
    whole = read_table(resolve(str(made.lay(tmp_path / "m", files)), workspace=base))
    assert table.headers() == whole.headers() and table.entries == whole.entries


def test_one_file_without_an_index(hub, ask, base, made):
    hub.push("org/name", {"config.json": b"{}", "model.safetensors": made.safetensors({"a": ("F16", (3, 5))})})
    source = fetch(ask(metadata=True), base).source
    assert list(read_table(source).entries) == ["a"]


def test_nothing_that_needs_weights_takes_it(hub, ask, base, made):
    hub.push("org/name", made.model())
    source = fetch(ask(metadata=True), base).source
    with pytest.raises(Refused) as e:
        resolve("org/name", workspace=base)
    assert e.value.code == "headers_only" and e.value.next == f"dz fetch org/name@{source.rev8}"
    with pytest.raises(Refused) as e:
        open_checkpoint(source)
    assert e.value.code == "headers_only"
    assert len(open_checkpoint(source, load_format="dummy")) == 6


def test_the_whole_model_afterwards_and_headers_afterwards(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    fetch(ask(metadata=True), base)
    hub.requests.clear()
    done = fetch(ask(), base)
    assert not done.fresh and done.document["status"] == "ok" and not done.source.headers
    assert {p: (done.source.path / p).read_bytes() for p in files} == files
    fetched = {Path(r.path).name for r in hub.content_gets()}
    assert fetched == {INDEX, "README.md", *(p for p in files if p.endswith(".safetensors"))}
    assert fetch(ask(metadata=True), base).fresh  # the weights are here: more than was asked for
    assert resolve("org/name", workspace=base) == done.source


def test_a_partial_fetch_after_headers_brings_only_what_it_names(hub, ask, base, made):
    hub.push("org/name", made.model())
    fetch(ask(metadata=True), base)
    done = fetch(ask(include=("config.json",)), base)
    assert [f.path for f in done.source.files] == ["config.json"]


def test_many_shards_take_a_request_each(hub, ask, base, made):
    files = made.model(shards=60)
    hub.push("org/name", files)
    hub.blobs.clear()
    for content in files.values():
        hub.blobs[made.server.sha256(content)] = content
    fetch(ask(metadata=True), base)
    shards = [p for p in files if p.endswith(".safetensors")]
    assert [len(hub.gets(p)) for p in shards] == [1] * 60
    assert not [r for r in hub.requests if r.method == "HEAD" and r.path.endswith(".safetensors")]


def test_a_header_longer_than_guessed_takes_a_second_request(hub, ask, base, made, small_steps):
    files = made.model()
    hub.push("org/name", files)
    source = fetch(ask(metadata=True), base).source
    asked = ranges(hub, SHARD)
    end = source.at(SHARD).stat().st_size
    assert len(asked) == 2 and asked[0].startswith("bytes=0-") and asked[1].endswith(f"-{end - 1}")


@pytest.mark.parametrize("kind", ["cut", "whole", "flip", "short", "status", "slow"])
def test_faults_that_pass(hub, ask, base, made, kind, small_steps):
    """A cut connection, a server that ignores ranges, wrong bytes once, a body that is short, a busy hub."""
    files = made.model()
    hub.push("org/name", files)
    hub.fault(SHARD, kind, status=503, seconds=0.05)
    source = fetch(ask(metadata=True), base).source
    assert files[SHARD].startswith(source.at(SHARD).read_bytes())
    assert len(read_table(source).entries) == 6


@pytest.mark.parametrize(
    ("status", "code"), [(429, "rate_limit"), (500, "hub"), (404, "missing_on_hub"), (403, "auth")]
)
def test_faults_that_stay(hub, ask, base, made, status, code):
    hub.push("org/name", made.model())
    hub.fault(SHARD, "status", times=9, status=status)
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask(metadata=True), base)
    assert e.value.code == code and SHARD in e.value.what
    hub.faults.clear()
    hub.requests.clear()
    fetch(ask(metadata=True), base)
    others = [p for p in made.model() if p.endswith(".safetensors") and p != SHARD]
    if status != 403:  # which ends the other transfers
        assert not any(hub.gets(p) for p in others)  # their headers came the first time


def test_a_server_whose_file_has_another_length(hub, ask, base, made):
    hub.push("org/name", made.model())
    hub.fault(SHARD, "longer", times=9)
    with pytest.raises(Refused) as e:
        fetch(ask(metadata=True), base)
    assert [(f.file, f.code) for f in e.value.faults] == [(SHARD, "wrong_size")]


def test_broken_headers_are_all_named(hub, ask, base, made):
    files = made.model()
    files[SHARD] = files[SHARD][:-1]
    files["model-00001-of-00003.safetensors"] = made.stub
    files["model-00003-of-00003.safetensors"] = made.safetensors({"renamed": ("F32", (7, 7))})
    hub.push("org/name", files)
    with pytest.raises(Refused) as e:
        fetch(ask(metadata=True), base)
    assert {(f.file[6:11], f.code) for f in e.value.faults} == {
        ("00001", "lfs_stub"),
        ("00002", "truncated"),
        ("00003", "missing_tensor"),
        ("00003", "extra_tensor"),
    }
    assert f"{len(files[SHARD]):,}" in next(f.text for f in e.value.faults if f.file == SHARD)


def test_headers_come_from_the_disk_where_the_weights_are(hub, ask, base, made):
    files = made.model()
    commit = hub.push("org/name", files)
    fetch(ask(), base).path.unlink()
    hub.requests.clear()
    done = fetch(ask(f"org/name@{commit}", metadata=True, offline=True), base)
    assert not hub.requests and len(read_table(done.source).entries) == 6


def test_a_spoilt_header_is_found_and_fetched_again(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    source = fetch(ask(metadata=True), base).source
    kept = source.at(SHARD).read_bytes()
    source.at(SHARD).write_bytes(kept[:-1])
    with pytest.raises(Refused) as e:
        resolve("org/name", workspace=base, headers=True)
    assert e.value.code == "changed" and e.value.next.endswith("--metadata")
    found = audit("org/name", workspace=base)
    assert [(f.file, f.code) for f in found.faults] == [(SHARD, "truncated")]
    hub.requests.clear()
    fetch(ask(metadata=True), base)
    assert source.at(SHARD).read_bytes() == kept
    assert [Path(r.path).name for r in hub.content_gets() if "safetensors" in r.path and "index" not in r.path] == [
        SHARD,
        SHARD,
    ]


def test_a_gated_repository_and_a_token(hub, ask, base, made):
    hub.push("org/name", made.model())
    hub.repos["org/name"].token = "hf_secretsecret"
    fetch(ask(metadata=True, token="hf_secretsecret"), base)
    cdn = [r for r in hub.requests if r.path.startswith("/cdn/")]
    assert cdn and not any(r.auth for r in cdn)
    hub.repos["org/name"].gated = True
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask(metadata=True, token="hf_secretsecret", force=True), base)
    assert e.value.code == "gated"


def test_a_preview_of_headers(hub, ask, base, made):
    hub.push("org/name", made.model())
    plan = acquire.preview(ask(metadata=True), workspace=base)
    validate(plan.document(ask(metadata=True).inputs))
    rows = {p for p, _, _ in plan.files}
    assert f"{SHARD}.header" in rows and SHARD not in rows and not base.exists()


def test_a_folder_has_its_weights(made, tmp_path, base, ask):
    folder = made.lay(tmp_path / "m", made.model())
    with pytest.raises(UsageError) as e:
        fetch(ask(str(folder), metadata=True), base)
    assert e.value.code == "folder_filter" and "--metadata" in e.value.what


def test_the_lock_reads_back(hub, ask, base, made):
    hub.push("org/name", made.model())
    done = fetch(ask(metadata=True), base)
    document = json.loads(done.path.read_text())
    assert document["data"]["source"]["headers"] == str(done.path.parent / "headers")
    assert resolve("org/name", workspace=base, headers=True) == done.source
