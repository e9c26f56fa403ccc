"""A locked source checked again at any time."""

import os

from dz.hub import acquire, recheck, resolve_lock

SHARD = "model-00002-of-00003.safetensors"


def rewrite(path, content):
    """Write under the same modification time, as decay on the disk does."""
    at = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(at, at))


def test_whole_then_spoilt(hub, ask, base, made, recorder):
    files = made.model()
    hub.push("org/name", files)
    folder = acquire.fetch(ask(), workspace=base).source.path
    lock = resolve_lock("org/name", workspace=base)
    assert recheck(lock, deep=True, progress=recorder).whole
    assert recorder.advanced["check 7 files"] == sum(map(len, files.values()))
    rewrite((folder / SHARD).resolve(), files[SHARD][:-1] + b"\xff")
    assert recheck(lock).whole  # the bytes of the weights are not read
    deep = recheck(lock, deep=True)
    assert [(f.file, f.code) for f in deep.faults] == [(SHARD, "wrong_bytes")]
    (folder / SHARD).unlink()
    (folder / "README.md").unlink()
    assert {(f.file, f.code) for f in recheck(lock, deep=True).faults} == {
        (SHARD, "missing_file"),
        ("README.md", "missing_file"),
    }


def test_what_was_left_out_on_request_is_not_missing(hub, ask, base, made):
    hub.push("org/name", made.model())
    acquire.fetch(ask(exclude=(SHARD,)), workspace=base)
    found = recheck(resolve_lock("org/name", workspace=base), deep=True)
    assert not found.faults and found.tensors == 4


def test_a_folder_has_no_hashes_to_compare(tmp_path, base, made):
    folder = made.lay(tmp_path / "m", made.model())
    lock = resolve_lock(str(folder), workspace=base)
    assert recheck(lock, deep=True).whole
    (folder / SHARD).write_bytes(b"junk")
    assert {f.file for f in recheck(lock).faults} == {SHARD}
