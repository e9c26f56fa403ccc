"""A whole fetch through the real hub client against a hub on loopback."""

import json
import os
from pathlib import Path

import huggingface_hub
import pytest

from dz.core.envelope import validate
from dz.errors import EnvironmentFailure, Refused, UsageError
from dz.hub import acquire, lock, resolve

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


def fetch(request, base, progress=None):
    return acquire.fetch(request, workspace=base, progress=progress)


def test_everything_arrives_at_one_commit(hub, ask, base, made, recorder):
    files = made.model(code=True)
    commit = hub.push("org/name", files)
    done = fetch(ask(), base, recorder)
    assert not done.fresh
    assert {p: (done.source.path / p).read_bytes() for p in files} == files
    assert done.source.commit == commit and done.source.rev8 == commit[:8]
    assert {f.path: f.sha256 for f in done.source.files} == {p: made.server.sha256(c) for p, c in files.items()}
    validate(done.document)
    assert done.path == base / f"org--name@{commit[:8]}" / "fetch.json"
    assert json.loads(done.path.read_text()) == done.document
    data = done.document["data"]
    assert data["complete"] and data["hashed"] and data["weights"]["tensors"] == 6
    assert recorder.advanced["fetch 8 files"] == sum(map(len, files.values())) == recorder.steps[0][1]


def test_a_rerun_keeps_the_commit_though_main_moves(hub, ask, base, made):
    old = hub.push("org/name", made.model())
    fetch(ask(), base)
    new = hub.push("org/name", made.model(seed=1))
    hub.requests.clear()
    again = fetch(ask(), base)
    assert again.fresh and again.source.commit == old and not hub.requests
    moved = fetch(ask("org/name@main"), base)
    assert moved.source.commit == new
    assert moved.document["reasons"] == [f"main moved: {old[:8]} was locked before, now it is {new[:8]}"]
    with pytest.raises(UsageError) as e:
        fetch(ask(), base)
    assert e.value.code == "ambiguous_revision" and old[:8] in e.value.why and new[:8] in e.value.why
    assert fetch(ask(f"org/name@{old[:8]}"), base).source.commit == old


def test_everything_is_downloaded_at_the_commit_even_if_main_moves_meanwhile(hub, ask, base, made, monkeypatch):
    files = made.model()
    old = hub.push("org/name", files)
    listing = acquire.Hub.files

    def move(self, name, commit):
        hub.push("org/name", made.model(seed=5))
        return listing(self, name, commit)

    monkeypatch.setattr(acquire.Hub, "files", move)
    done = fetch(ask(), base)
    assert done.source.commit == old
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]


def test_a_cut_connection_goes_on_where_it_stopped(hub, ask, base, made, recorder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 61)
    files = made.model()
    hub.push("org/name", files)
    hub.fault(SHARD, "cut")
    done = fetch(ask(), base, recorder)
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]
    ranges = [r.range for r in hub.content_gets() if r.path.endswith(SHARD)]
    half = len(files[SHARD]) // 2
    assert ranges[-1] == f"bytes={half - half % 61}-"
    assert recorder.advanced["fetch 7 files"] == sum(map(len, files.values()))
    assert any("resume" in n.lower() for n in recorder.notes)
    assert not any(made.server.SECRET in n for n in recorder.notes)


def test_after_a_failure_only_what_is_missing_is_fetched(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    hub.fault(SHARD, "status", times=9, status=503)
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask(), base)
    assert e.value.what == f"1 of 7 files of org/name could not be fetched: {SHARD}"
    assert "503" in e.value.why and e.value.exit_code == 3 and "dz fetch org/name" in e.value.next
    assert not list(base.glob("*/fetch.json"))
    hub.faults.clear()
    hub.requests.clear()
    assert not fetch(ask(), base).fresh
    assert {Path(r.path).name for r in hub.content_gets()} == {SHARD, INDEX}


def test_a_busy_hub_is_asked_again(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    hub.fault("info", "status", status=503)
    hub.fault(SHARD, "status", times=2, status=502)
    assert (fetch(ask(), base).source.path / SHARD).read_bytes() == files[SHARD]


def test_wrong_bytes_are_fetched_again(hub, ask, base, made, recorder):
    files = made.model()
    hub.push("org/name", files)
    hub.fault(SHARD, "flip")
    done = fetch(ask(), base, recorder)
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]
    assert [n for n in recorder.notes if n.startswith(f"{SHARD}: sha256")]


@pytest.mark.parametrize("path", [SHARD, "config.json"])  # one has a sha256, the other git's blob id
def test_wrong_bytes_twice_are_refused_and_removed(hub, ask, base, made, path):
    hub.push("org/name", made.model())
    hub.fault(path, "flip", times=9)
    with pytest.raises(Refused) as e:
        fetch(ask(), base)
    assert [(f.file, f.code) for f in e.value.faults] == [(path, "wrong_bytes")]
    assert not list(base.glob("*/fetch.json"))
    left = [p.name for p in (ask().cache / "models--org--name").rglob("*") if p.is_file()]
    assert path not in left and len([p for p in left if len(p) in (40, 64)]) == 6


def test_a_flipped_byte_on_disk_is_found_and_that_file_alone_repaired(hub, ask, base, made, recorder):
    files = made.model()
    commit = hub.push("org/name", files)
    done = fetch(ask(), base)
    blob = (done.source.path / SHARD).resolve()
    blob.write_bytes(files[SHARD][:-3] + b"\0\0\0")
    with pytest.raises(Refused) as e:
        resolve("org/name", workspace=base)
    assert e.value.code == "changed" and SHARD in e.value.why
    hub.requests.clear()
    again = fetch(ask(), base, recorder)
    assert not again.fresh and again.source.files == done.source.files
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]
    assert {Path(r.path).name for r in hub.content_gets()} == {SHARD, INDEX}
    assert recorder.steps[0] == ("check 1 files", len(files[SHARD]))  # the others were compared, and not touched since
    assert resolve("org/name", workspace=base).commit == commit


def test_a_truncated_file_on_disk_is_replaced(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    done = fetch(ask(), base)
    (done.source.path / SHARD).resolve().write_bytes(files[SHARD][:-1])
    assert not fetch(ask(), base).fresh
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]


def test_force_fetches_everything_again(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    fetch(ask(), base)
    hub.requests.clear()
    assert not fetch(ask(force=True), base).fresh
    assert {Path(r.path).name for r in hub.content_gets()} == set(files)


def test_only_indexed_files_are_fetched(hub, ask, base, made):
    files = made.model()
    stray = {"original/x.safetensors": made.safetensors({"x": ("F32", (3,))}), "model.safetensors": b"junk"}
    stray |= {"pytorch_model.bin": b"pickle", "m.gguf": b"GGUF", "model.fp8.safetensors.index.json": b"{}"}
    hub.push("org/name", files | stray)
    done = fetch(ask(), base)
    assert {f.path for f in done.source.files} == set(files)
    assert {i["path"] for i in done.document["data"]["ignored"]} == set(stray)
    assert not {Path(r.path).name for r in hub.content_gets()} & {"x.safetensors", "model.safetensors", "m.gguf"}
    named = fetch(ask(include=("m.gguf",), cache=ask().cache.with_name("other")), base.with_name("other-reports"))
    assert [f.path for f in named.source.files] == ["m.gguf"] and not named.document["data"]["complete"]


def test_no_safetensors_is_refused_before_any_download(hub, ask, base, made):
    files = {"config.json": b"{}", "pytorch_model.bin": b"x" * 10, "model.gguf": b"y" * 5}
    hub.push("org/name", files)
    with pytest.raises(Refused) as e:
        fetch(ask(), base)
    assert e.value.code == "no_safetensors" and "2 weight files (15 bytes)" in e.value.why
    assert not hub.content_gets()


def test_a_repository_that_lacks_a_shard_is_refused_before_any_download(hub, ask, base, made):
    files = made.model()
    del files[SHARD]
    hub.push("org/name", files)
    with pytest.raises(Refused) as e:
        fetch(ask(), base)
    assert e.value.code == "incomplete" and SHARD in e.value.why and "1 of 3" in e.value.what
    assert {Path(r.path).name for r in hub.content_gets()} == {INDEX}


def test_a_broken_repository_is_refused_with_all_its_faults(hub, ask, base, made):
    files = made.model()
    files[SHARD] = files[SHARD][:-1]
    files["tokenizer.json"] = made.stub
    files["model-00003-of-00003.safetensors"] = made.safetensors({"renamed": ("F32", (7, 7))})
    hub.push("org/name", files)
    with pytest.raises(Refused) as e:
        fetch(ask(), base)
    found = {(f.file, f.code) for f in e.value.faults}
    third = "model-00003-of-00003.safetensors"
    assert found == {
        (SHARD, "truncated"),
        ("tokenizer.json", "lfs_stub"),
        (third, "missing_tensor"),
        (third, "extra_tensor"),
    }
    assert f"has {len(files[SHARD]):,}" in next(f.text for f in e.value.faults if f.file == SHARD)
    validate(e.value.data())


def test_dry_run_lists_and_writes_nothing(hub, ask, base, made, tmp_path):
    files = made.model() | {"pytorch_model.bin": b"x" * 9}
    commit = hub.push("org/name", files)
    plan = acquire.preview(ask(), workspace=base)
    assert not list(tmp_path.iterdir())
    assert {p: (s, c) for p, s, c in plan.files} == {p: (len(b), False) for p, b in files.items() if "pytorch" not in p}
    assert plan.commit == commit and plan.need == sum(s for _, s, _ in plan.files)
    assert [(i.path, i.size) for i in plan.ignored] == [("pytorch_model.bin", 9)]
    validate(plan.document(ask().inputs))
    fetch(ask(), base)
    assert acquire.preview(ask(), workspace=base).need == 0


def test_include_and_exclude(hub, ask, base, made):
    hub.push("org/name", made.model())
    partial = fetch(ask(include=("*.json",), exclude=("tokenizer*",)), base)
    assert {f.path for f in partial.source.files} == {"config.json", INDEX}
    assert partial.document["status"] == "partial" and not partial.document["data"]["complete"]
    validate(partial.document)
    assert fetch(ask(include=("*.json",), exclude=("tokenizer*",)), base).fresh
    whole = fetch(ask(), base)
    assert not whole.fresh and whole.document["status"] == "ok"
    narrowed = fetch(ask(include=("config.json",)), base)
    assert len(narrowed.source.files) == 7 and narrowed.document["status"] == "ok"
    with pytest.raises(UsageError) as e:
        fetch(ask(include=("*.nothing",), model="org/name@main", cache=ask().cache / "x"), base / "x")
    assert e.value.code == "nothing" and "*.nothing" in e.value.why


def test_local_dir(hub, ask, base, made, tmp_path):
    files = made.model()
    hub.push("org/name", files)
    there = tmp_path / "there"
    made.lay(there, {"config.json": files["config.json"], SHARD: b"x" * len(files[SHARD])})
    done = fetch(ask(local_dir=there), base)
    assert done.source.path == there and (there / SHARD).read_bytes() == files[SHARD]
    assert not [r for r in hub.gets("config.json") if "resolve" in r.path]
    assert fetch(ask(), base).fresh and fetch(ask(local_dir=there), base).fresh
    assert not list(ask().cache.glob("*/blobs/*"))
    os.utime(there / SHARD, ns=(1, 1))
    assert fetch(ask(cache=tmp_path / "elsewhere"), base).source.path == there  # it stays where the user put it


def test_a_full_disk_is_said_before_the_first_byte(hub, ask, base, made, monkeypatch, tmp_path):
    hub.push("org/name", made.model())
    asked = []

    def small(path):
        asked.append(Path(path))
        return type("S", (), {"f_bavail": 2, "f_frsize": 10, "f_blocks": 9, "f_bfree": 2})()

    with monkeypatch.context() as full:
        full.setattr("os.statvfs", small)
        plan = acquire.preview(ask(), workspace=base)
        with pytest.raises(EnvironmentFailure) as e:
            fetch(ask(), base)
        assert e.value.code == "disk_full" and f"{plan.need:,} more bytes" in e.value.what
        assert "20 bytes are free" in e.value.why and plan.free == 20
        assert {Path(r.path).name for r in hub.content_gets()} == {INDEX}
        disk = tmp_path / "disk"
        disk.mkdir()
        (tmp_path / "link").symlink_to(disk)
        with pytest.raises(EnvironmentFailure) as e:
            fetch(ask(local_dir=tmp_path / "link" / "deep" / "er"), base)
        assert asked[-1] == disk and str(disk) in e.value.why  # the mount behind the link is measured
    fetch(ask(), base).path.unlink()
    with monkeypatch.context() as full:
        full.setattr("os.statvfs", small)
        assert not fetch(ask(), base).fresh  # every byte is there already: no space is needed


def test_another_revision_reuses_the_blobs(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    fetch(ask(), base)
    new = hub.push("org/name", files | {"README.md": b"# changed\n"})
    plan = acquire.preview(ask("org/name@main"), workspace=base)
    assert plan.need == len(b"# changed\n") and sum(not c for _, _, c in plan.files) == 1
    hub.requests.clear()
    assert fetch(ask("org/name@main"), base).source.commit == new
    assert {Path(r.path).name for r in hub.content_gets()} == {"README.md", INDEX}


def test_private_gated_missing(hub, ask, base, made):
    hub.push("org/private", made.model())
    hub.repos["org/private"].token = "hf_secretsecret"
    hub.push("org/gated", made.model())
    hub.repos["org/gated"].gated = True
    cases = {
        "org/private": ("not_found", 3),
        "org/gated": ("gated", 3),
        "org/none": ("not_found", 3),
        "org/private@nope": ("not_found", 3),
    }
    for model, (code, exit_code) in cases.items():
        with pytest.raises(EnvironmentFailure) as e:
            fetch(ask(model), base)
        assert (e.value.code, e.value.exit_code) == (code, exit_code), model
        assert model.partition("@")[0] in e.value.what
    done = fetch(ask("org/private", token="hf_secretsecret"), base)
    assert "hf_secretsecret" not in done.path.read_text() and "hf_secretsecret" not in repr(
        ask(token="hf_secretsecret")
    )
    cdn = [r for r in hub.requests if r.path.startswith("/cdn/")]
    assert cdn and not any(r.auth for r in cdn)
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask("org/private", token="hf_wrongwrong"), base.with_name("b"))
    assert "hf_wrongwrong" not in "".join(e.value.lines())


def test_an_unknown_revision(hub, ask, base, made):
    hub.push("org/name", made.model())
    with pytest.raises(UsageError) as e:
        fetch(ask("org/name@v9"), base)
    assert e.value.code == "revision_not_found" and "v9" in e.value.what


@pytest.mark.parametrize(
    ("status", "code"), [(404, "missing_on_hub"), (429, "rate_limit"), (500, "hub"), (403, "auth")]
)
def test_an_index_that_cannot_be_read(hub, ask, base, made, status, code):
    hub.push("org/name", made.model())
    hub.fault(INDEX, "status", times=9, status=status)
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask(), base)
    assert e.value.code == code and e.value.exit_code == 3


def test_offline(hub, ask, base, made):
    hub.push("org/name", made.model())
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask(offline=True), base)
    assert e.value.code == "offline" and not hub.requests
    fetch(ask(), base)
    assert fetch(ask(offline=True), base).fresh
    assert fetch(ask("org/name@main", offline=True), base).fresh
    with pytest.raises(EnvironmentFailure):
        fetch(ask("org/name@other", offline=True), base)


def test_offline_from_the_clients_cache(hub, ask, base, made):
    """What `hf download` brought is locked without the network; the names of the blobs are the hashes."""
    files = made.model()
    commit = hub.push("org/name", files)
    huggingface_hub.snapshot_download("org/name", endpoint=hub.url, cache_dir=ask().cache)
    hub.requests.clear()
    done = fetch(ask(offline=True), base)
    assert not hub.requests
    done.path.unlink()
    first = fetch(ask(), base)
    first.path.unlink()
    hub.requests.clear()
    done = fetch(ask(offline=True), base)
    assert done.source == first.source and done.source.commit == commit and not hub.requests
    assert "offline" in done.document["reasons"][0] and done.document["data"]["hashed"]
    done.path.unlink()
    (done.source.path / SHARD).resolve().write_bytes(files[SHARD][:-1] + b"\xff")
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask(offline=True), base)
    assert e.value.code == "offline" and SHARD in e.value.what
    (done.source.path / SHARD).unlink()
    with pytest.raises(Refused) as e:
        fetch(ask(offline=True), base)
    assert e.value.code == "incomplete" and not hub.requests


def test_near_names_of_what_was_fetched(hub, ask, base, made):
    hub.push("org/name", made.model())
    fetch(ask(), base)
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask("org/nmae"), base)
    assert e.value.why.endswith("fetched before: org/name") and e.value.next.endswith("dz fetch org/nmae")


def test_nobody_there(ask, base):
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask(endpoint="http://127.0.0.1:9"), base)
    assert e.value.code == "connection" and "http://127.0.0.1:9" in e.value.what


def test_a_hub_without_hashes_is_said(hub, ask, base, made):
    hub.lists_hashes = False
    hub.push("org/name", made.model())
    done = fetch(ask(), base)
    assert not done.document["data"]["hashed"] and "no hash for 7 files" in " ".join(done.document["reasons"])


def test_code_and_foreign_code_are_recorded(hub, ask, base, made):
    config = {"auto_map": {"AutoModel": "modeling_made_up.Model"}, "vision": {"auto_map": {"A": "other/repo--m.C"}}}
    files = made.model(code=True) | {"config.json": json.dumps(config).encode()}
    files["tokenizer_config.json"] = json.dumps({"auto_map": {"AutoTokenizer": [None, "third/x--t.T"]}}).encode()
    hub.push("org/name", files)
    done = fetch(ask(), base)
    assert done.document["data"]["foreign_code"] == ["other/repo", "third/x"]
    changed = hub.push("org/name", files | {"modeling_made_up.py": b"class Model: x = 1\n"})
    other = fetch(ask("org/name@main"), base)
    assert other.source.commit == changed
    assert done.source.code_hash and other.source.code_hash != done.source.code_hash


def test_renamed(hub, ask, base, made):
    hub.push("org/name", made.model())
    hub.repos["org/name"].renamed_to = "org/better"
    assert "org/name is called org/better now" in fetch(ask(), base).document["reasons"]


def test_names_that_lead_out_are_refused(hub, ask, base, made):
    hub.push("org/name", made.model() | {"../../evil.json": b"{}"})
    with pytest.raises(Refused) as e:
        fetch(ask(), base)
    assert e.value.code == "unsafe_path"


def test_ctrl_c_ends_the_transfer_and_the_next_run_completes_it(hub, ask, base, made, monkeypatch):
    files = made.model()
    hub.push("org/name", files)
    waits = iter([KeyboardInterrupt])
    from dz.hub import pool

    real = pool.wait

    def interrupt(*args, **kwargs):
        for error in waits:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(pool, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(ask(), base)
    assert not lock.of_name("org/name", base)
    assert not list(ask().cache.rglob("*.incomplete"))
    done = fetch(ask(), base)
    assert {p: (done.source.path / p).read_bytes() for p in files} == files
