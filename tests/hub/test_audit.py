"""`dz fetch --verify`: every byte that is here against everything that is known about it."""

import json
import os
from pathlib import Path

import huggingface_hub
import pytest

from dz.core.envelope import validate
from dz.errors import Refused, UsageError
from dz.hub import acquire, audit, resolve

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


def fetch(request, base):
    return acquire.fetch(request, workspace=base)


def decay(path, at=-1):
    """Flip a bit under the same modification time, as a disk does."""
    path = path.resolve()
    when = path.stat().st_mtime_ns
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(when, when))


def found(audit_):
    return {(f.file, f.code) for f in audit_.faults}


def test_a_whole_model(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    source = fetch(ask(), base).source
    hub.requests.clear()
    seen = audit("org/name", workspace=base)
    validate(seen.document({"model": "org/name"}))
    assert not seen.faults and not hub.requests
    assert (seen.files, seen.compared, seen.recorded, seen.tensors) == (7, 7, 0, 6)
    assert seen.read == sum(map(len, files.values())) and seen.folder == source.folder
    seen.refuse()


@pytest.mark.parametrize("path", [SHARD, "tokenizer.json", "README.md"])
def test_only_the_broken_file_is_named_kept_from_use_and_mended(hub, ask, base, made, recorder, path):
    files = made.model()
    hub.push("org/name", files)
    source = fetch(ask(), base).source
    decay(source.path / path)
    resolve("org/name", workspace=base)  # nothing shows it but its bytes
    seen = audit("org/name", workspace=base)
    assert {f.file for f in seen.faults} == {path}
    with pytest.raises(Refused) as e:
        seen.refuse()
    assert e.value.next == f"dz fetch org/name@{source.rev8}: of 7 files it fetches 1 again"
    with pytest.raises(Refused) as e:
        resolve("org/name", workspace=base)
    assert e.value.code == "broken_files" and path in e.value.why
    hub.requests.clear()
    acquire.fetch(ask(), workspace=base, progress=recorder)
    assert {Path(r.path).name for r in hub.content_gets()} == {path, INDEX}
    assert recorder.steps[0] == ("fetch 1 files", len(files[path]))  # known to be broken: not read before
    assert resolve("org/name", workspace=base) == source
    assert not audit("org/name", workspace=base).faults


def test_every_kind_of_fault_at_once(hub, ask, base, made, tmp_path):
    hub.push("org/name", made.model())
    there = fetch(ask(local_dir=tmp_path / "d"), base).source.path
    (there / "model-00001-of-00003.safetensors").unlink()
    (there / SHARD).write_bytes((there / SHARD).read_bytes()[:-1])
    (there / "tokenizer.json").write_bytes(made.stub)
    (there / "README.md").write_bytes(b"")
    decay(there / "config.json", at=0)
    decay(there / "model-00003-of-00003.safetensors")
    seen = audit("org/name", workspace=base)
    assert found(seen) == {
        ("model-00001-of-00003.safetensors", "missing_file"),
        (SHARD, "truncated"),
        ("tokenizer.json", "lfs_stub"),
        ("README.md", "wrong_size"),
        ("config.json", "bad_json"),
        ("model-00003-of-00003.safetensors", "wrong_bytes"),
    }
    with pytest.raises(Refused) as e:
        seen.refuse()
    validate(e.value.data())
    assert found(audit(str(there), workspace=base)) == found(seen)  # the folder's lock is the model's
    fetch(ask(), base)
    assert not audit(str(there), workspace=base).faults


def test_a_file_that_was_only_touched_is_right_again(hub, ask, base, made):
    hub.push("org/name", made.model())
    source = fetch(ask(), base).source
    os.utime((source.path / SHARD).resolve(), ns=(1, 1))
    with pytest.raises(Refused):
        resolve("org/name", workspace=base)
    assert not audit("org/name", workspace=base).faults
    assert resolve("org/name", workspace=base) == source


def test_strays_and_second_copies_are_listed(hub, ask, base, made, tmp_path):
    files = made.model()
    hub.push("org/name", files)
    there = fetch(ask(local_dir=tmp_path / "d"), base).source.path
    made.lay(there, {"original/copy.safetensors": files[SHARD], "model.safetensors": b"junk", "extra.jinja": b"x"})
    seen = audit("org/name", workspace=base)
    assert not seen.faults
    notes = "\n".join(n for n in seen.notes if n.startswith("stray"))
    assert f"original/copy.safetensors ({len(files[SHARD])} bytes): the same bytes as {SHARD}" in notes
    assert "model.safetensors (4 bytes): weights that are not read" in notes and "extra.jinja" in notes


def test_what_ended_transfers_left_is_listed(hub, ask, base, made, tmp_path):
    hub.push("org/name", made.model())
    source = fetch(ask(), base).source
    assert not [n for n in audit("org/name", workspace=base).notes if n.startswith("left over")]
    blobs = source.path.parent.parent / "blobs"
    (blobs / "aa.bb.incomplete").write_bytes(b"x" * 1234)
    (note,) = [n for n in audit("org/name", workspace=base).notes if n.startswith("left over")]
    assert "1 files (1,234 bytes)" in note and str(blobs) in note


def test_a_folder_of_ones_own(made, tmp_path, base):
    """Nothing is known about its bytes the first time; they are recorded, and compared from then on."""
    folder = made.lay(tmp_path / "m", made.model())
    first = audit(str(folder), workspace=base)
    validate(first.document({"model": str(folder)}))
    assert not first.faults and first.compared == 0 and first.recorded == 7
    assert audit(str(folder), workspace=base).compared == 7
    assert resolve(str(folder), workspace=base).files[0].sha256
    decay(folder / SHARD)
    assert resolve(str(folder), workspace=base)
    seen = audit(str(folder), workspace=base)
    assert found(seen) == {(SHARD, "wrong_bytes")}
    with pytest.raises(Refused) as e:
        resolve(str(folder), workspace=base)
    assert e.value.code == "broken_files" and "--force" in e.value.next
    decay(folder / SHARD)  # the same bit once more: mended
    assert not audit(str(folder), workspace=base).faults
    assert resolve(str(folder), workspace=base)


def test_what_a_folder_knew_survives_an_edit_of_its_configuration(made, tmp_path, base):
    folder = made.lay(tmp_path / "m", made.model())
    audit(str(folder), workspace=base)
    (folder / "config.json").write_text('{"model_type": "made_up", "seed": 5}')
    assert found(audit(str(folder), workspace=base)) == {("config.json", "wrong_bytes")}
    source = resolve(str(folder), workspace=base)  # the edit was meant: it is another revision
    assert {f.path for f in source.files if not f.sha256} == {"config.json"}
    again = audit(str(folder), workspace=base)
    assert not again.faults and again.compared == 6 and again.recorded == 1


def test_a_folder_that_the_client_fetched_knows_its_hashes(hub, made, tmp_path, base):
    files = made.model()
    hub.push("org/name", files)
    folder = tmp_path / "d"
    huggingface_hub.snapshot_download("org/name", endpoint=hub.url, local_dir=folder)
    seen = audit(str(folder), workspace=base)
    assert not seen.faults and seen.compared == 7
    for path in (base).rglob("fetch.json"):
        path.unlink()
    decay(folder / SHARD)
    decay(folder / "README.md")
    assert found(audit(str(folder), workspace=base)) == {(SHARD, "wrong_bytes"), ("README.md", "wrong_bytes")}


def test_a_folder_of_two_commits(hub, made, tmp_path, base):
    hub.push("org/name", made.model())
    folder = tmp_path / "d"
    huggingface_hub.snapshot_download("org/name", endpoint=hub.url, local_dir=folder)
    new = hub.push("org/name", made.model(seed=1))
    huggingface_hub.snapshot_download("org/name", endpoint=hub.url, local_dir=folder, allow_patterns=[SHARD])
    seen = audit(str(folder), workspace=base)
    assert found(seen) == {(SHARD, "mixed_revision")} and new[:8] in seen.faults[0].text


def test_the_snapshot_of_the_clients_cache(hub, made, tmp_path, base):
    hub.push("org/name", made.model())
    folder = Path(huggingface_hub.snapshot_download("org/name", endpoint=hub.url, cache_dir=tmp_path / "c"))
    decay(folder / SHARD)
    seen = audit(str(folder), workspace=base)
    assert found(seen) == {(SHARD, "wrong_bytes")} and not base.exists()


def test_two_commits_in_one_local_dir_are_no_mixture(hub, ask, base, made, tmp_path):
    """Files that two commits share are right for both: their hashes say so, whatever the client's notes say."""
    files = made.model()
    hub.push("org/name", files)
    fetch(ask(local_dir=tmp_path / "d"), base)
    hub.push("org/name", files | {"README.md": b"# changed\n"})
    done = fetch(ask("org/name@main", local_dir=tmp_path / "d"), base)
    assert not [r for r in done.document["reasons"] if "commits" in r]
    seen = audit(f"org/name@{done.source.rev8}", workspace=base)
    assert not seen.faults


def test_what_was_never_fetched(base, tmp_path):
    for model in ("org/name", str(tmp_path / "none")):
        with pytest.raises(UsageError):
            audit(model, workspace=base)


def test_a_file_that_cannot_be_read(hub, ask, base, made, monkeypatch):
    hub.push("org/name", made.model())
    fetch(ask(), base)
    from dz.hub import again

    real = again.compare

    def broken_disk(path, entry, advance):
        if entry.path == SHARD:
            raise OSError(5, "Input/output error")
        return real(path, entry, advance)

    monkeypatch.setattr(again, "compare", broken_disk)
    assert found(audit("org/name", workspace=base)) == {(SHARD, "unreadable")}


def test_the_lock_keeps_what_was_asked_for(hub, ask, base, made):
    hub.push("org/name", made.model())
    done = fetch(ask(), base)
    decay(done.source.path / SHARD)
    audit("org/name", workspace=base)
    document = json.loads(done.path.read_text())
    validate(document)
    assert document["inputs"] == done.document["inputs"] and document["data"]["broken"] == [SHARD]


def test_a_folder_whose_file_was_found_broken_is_kept_from_use_until_it_is_written_again(tmp_path, base, made):
    """The damage came with a new modification time, as of a copy that went wrong."""
    folder = made.lay(tmp_path / "mine", made.model())
    acquire.fetch(acquire.Request(model=str(folder)), workspace=base)
    assert not audit(str(folder), workspace=base).faults
    shard = folder / SHARD
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert {f.file for f in audit(str(folder), workspace=base).faults} == {SHARD}
    with pytest.raises(Refused) as e:
        resolve(str(folder), workspace=base)
    assert e.value.code == "broken_files" and SHARD in e.value.why
    assert {f.file for f in audit(str(folder), workspace=base).faults} == {SHARD}
    shard.write_bytes(whole)
    resolve(str(folder), workspace=base)
    assert not audit(str(folder), workspace=base).faults
