"""A large file goes on where an earlier run was ended, whatever ended it."""

import errno
import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dz.errors import EnvironmentFailure, Refused
from dz.hub import acquire
from dz.hub.partial import have, part_beside

ROOT = Path(__file__).resolve().parents[2]
SHARD = "model-00002-of-00003.safetensors"


def test_a_killed_process_loses_nothing_that_was_written(hub, base, made, tmp_path):
    """SIGKILL in the middle of a file of real size, in the client's own chunks; the next process asks for the rest."""
    n = 24 << 20
    raw = json.dumps({"a": {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}}).encode()
    weights = struct.pack("<Q", len(raw)) + raw + bytes(n)
    hub.push("org/name", {"config.json": b"{}", "model.safetensors": weights})
    hub.fault("model.safetensors", "stall", seconds=30)
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "DZ_WORKSPACE": str(base)}
    command = [sys.executable, "-m", "dz", "fetch", "org/name"]
    run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    parts = []
    while not any(p.stat().st_size for p in parts) and time.monotonic() < deadline:
        time.sleep(0.05)
        parts = list((tmp_path / "cache").rglob("*.dz.incomplete"))
    run.kill()
    run.wait()
    there = parts[0].stat().st_size
    assert 0 < there < len(weights)
    hub.requests.clear()
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=30)
    assert [r.range for r in hub.content_gets() if "/cdn/" in r.path] == [f"bytes={there}-"]
    assert next((tmp_path / "cache").rglob("model.safetensors")).read_bytes() == weights


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Every file with a sha256 counts as large, and comes in small chunks."""
    monkeypatch.setattr("dz.hub.partial.LARGE", 1)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 61)


def fetch(request, base, progress=None):
    return acquire.fetch(request, workspace=base, progress=progress)


def part_of(request, made, files, path=SHARD):
    """Where the part of a file of the cache lies."""
    sha = made.server.sha256(files[path])
    blob = request.cache / "models--org--name" / "blobs" / sha
    return blob.with_name(f"{sha}.{sha[:16]}.dz.incomplete")


def ended(hub, ask, base, files, monkeypatch, **more):
    """A run that ends in the middle of a shard: the connection breaks, and no second try is made."""
    hub.push("org/name", files)

    def full(seconds):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as once:
        once.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=full, time=time.time))
        hub.fault(SHARD, "cut")
        once.setattr("dz.hub.client.WAITS", ())
        with pytest.raises(EnvironmentFailure):
            fetch(ask(**more), base)
    hub.faults.clear()
    hub.requests.clear()


@pytest.mark.parametrize("local", [False, True])
def test_the_next_run_asks_for_the_rest_alone(hub, ask, base, made, monkeypatch, tmp_path, recorder, local):
    files = made.model()
    more = {"local_dir": tmp_path / "there"} if local else {}
    ended(hub, ask, base, files, monkeypatch, **more)
    there = len(files[SHARD]) // 2 // 61 * 61
    (part,) = tmp_path.rglob(f"*{made.server.sha256(files[SHARD])[:16]}.dz.incomplete")
    kept = part.read_bytes()
    assert len(kept) == there
    plan = acquire.preview(ask(**more), workspace=base)
    part.unlink()
    assert acquire.preview(ask(**more), workspace=base).need == plan.need + there  # what is there counts as there
    part.write_bytes(kept)
    hub.requests.clear()
    done = fetch(ask(**more), base, recorder)
    assert {p: (done.source.path / p).read_bytes() for p in files} == files
    assert [r.range for r in hub.content_gets() if "/cdn/" in r.path and r.path.endswith(SHARD)] == [f"bytes={there}-"]
    step, total = next((name, n) for name, n in recorder.steps if name.startswith("fetch"))
    assert recorder.advanced[step] == total == plan.need
    assert not list(tmp_path.rglob("*.incomplete"))
    assert fetch(ask(**more), base).fresh
    if local:
        note = tmp_path / "there" / ".cache/huggingface/download" / f"{SHARD}.metadata"
        assert note.read_text().split()[:2] == [done.source.commit, made.server.sha256(files[SHARD])]


def test_a_part_with_wrong_bytes_is_given_up(hub, ask, base, made, recorder):
    """The other half fits in length and not in content: the sum tells, and the whole file is fetched once more."""
    files = made.model()
    hub.push("org/name", files)
    part = part_of(ask(), made, files)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"\xaa" * 100)
    done = fetch(ask(), base, recorder)
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]
    assert [n for n in recorder.notes if n.startswith(f"{SHARD}: sha256")]
    assert [r.range for r in hub.content_gets() if "/cdn/" in r.path and r.path.endswith(SHARD)] == ["bytes=100-", ""]


@pytest.mark.parametrize("extra", [0, 1])
def test_a_part_that_is_whole_or_too_long(hub, ask, base, made, extra):
    files = made.model()
    hub.push("org/name", files)
    part = part_of(ask(), made, files)
    part.parent.mkdir(parents=True)
    part.write_bytes(files[SHARD] + b"x" * extra)
    done = fetch(ask(), base)
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]
    got = [r for r in hub.content_gets() if "/cdn/" in r.path and r.path.endswith(SHARD)]
    assert len(got) == extra


def test_a_server_that_does_not_heed_ranges_starts_over(hub, ask, base, made, monkeypatch):
    files = made.model()
    ended(hub, ask, base, files, monkeypatch)
    hub.fault(SHARD, "whole", times=9)
    done = fetch(ask(), base)
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]


def test_another_revision_never_goes_on_with_these_bytes(hub, ask, base, made, monkeypatch):
    ended(hub, ask, base, made.model(), monkeypatch)
    files = made.model(seed=9)
    hub.push("org/name", files)
    done = fetch(ask(), base)
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]


def test_wrong_bytes_twice_leave_nothing_in_the_cache(hub, ask, base, made, tmp_path):
    files = made.model()
    hub.push("org/name", files)
    hub.fault(SHARD, "flip", times=9)
    with pytest.raises(Refused) as e:
        fetch(ask(), base)
    assert [(f.file, f.code) for f in e.value.faults] == [(SHARD, "wrong_bytes")]
    assert not list(tmp_path.rglob(f"{made.server.sha256(files[SHARD])}*"))


@pytest.mark.parametrize("disabled", [True, False])
def test_deduplicated_files_go_the_clients_way_if_it_has_one(hub, ask, base, made, monkeypatch, disabled):
    """Announced as Xet's: by ranges where that is switched off, else wholly by the client's own transfer."""
    files = made.model()
    hub.push("org/name", files)
    hub.xet = True
    taken = []

    def transfer(*, incomplete_path, xet_file_data, expected_size, **_):
        taken.append(xet_file_data.file_hash)
        incomplete_path.write_bytes(hub.blobs[xet_file_data.file_hash])

    monkeypatch.setattr("huggingface_hub.file_download.xet_get", transfer)
    monkeypatch.setattr("huggingface_hub.file_download.is_xet_available", lambda: not disabled)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", disabled)
    monkeypatch.setattr("dz.hub.client.find_spec", lambda name: object())
    done = fetch(ask(), base)
    assert {p: (done.source.path / p).read_bytes() for p in files} == files
    large = {made.server.sha256(c) for p, c in files.items() if p.endswith(made.server.LFS_ENDINGS)}
    assert set(taken) == (set() if disabled else large)
    assert bool([r for r in hub.requests if "/cdn/" in r.path]) == disabled
    assert not list(ask().cache.rglob("*.incomplete"))


def test_two_runs_at_once_share_one_transfer(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    hub.fault(SHARD, "slow", seconds=0.4)
    done = []
    runs = [threading.Thread(target=lambda n=n: done.append(fetch(ask(), base / str(n)))) for n in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [(d.source.path / SHARD).read_bytes() for d in done] == [files[SHARD]] * 2
    assert len([r for r in hub.content_gets() if "/cdn/" in r.path and r.path.endswith(SHARD)]) == 1


def test_a_file_that_another_process_placed_meanwhile_is_not_fetched(hub, ask, base, made, monkeypatch):
    """Both looked before either began; the second opens its part after the first has put the file in place."""
    files = made.model()
    hub.push("org/name", files)
    blob = part_of(ask(), made, files).with_name(made.server.sha256(files[SHARD]))
    real = acquire.Hub.download_part

    def late(self, name, commit, entry, part, **more):
        if entry.path == SHARD:
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(files[SHARD])
        return real(self, name, commit, entry, part, **more)

    monkeypatch.setattr(acquire.Hub, "download_part", late)
    done = fetch(ask(), base)
    assert (done.source.path / SHARD).read_bytes() == files[SHARD]
    assert not [r for r in hub.content_gets() if "/cdn/" in r.path and r.path.endswith(SHARD)]
    assert not list(ask().cache.rglob("*.incomplete"))


def test_a_mirror_whose_file_has_another_length(hub, ask, base, made):
    """The hub's listing and what resolve serves disagree: said with both lengths, and nothing is kept."""
    files = made.model()
    hub.push("org/name", files)
    row = made.server._Handler.row

    def listed(self, path, content):
        out = row(self, path, content)
        if path == SHARD:
            out["lfs"]["size"] = out["size"] = len(content) + 5
        return out

    hub.server.RequestHandlerClass.row = listed
    with pytest.raises(Refused) as e:
        fetch(ask(), base)
    assert e.value.code == "wrong_size" and f"{len(files[SHARD]) + 5:,}" in e.value.why


def test_have(tmp_path):
    from dz.core.source import FileEntry

    entry = FileEntry(path="a", size=10, sha256="ab" * 32)
    part = part_beside(Path(tmp_path / "a"), entry)
    assert part.name == f"a.{'ab' * 8}.dz.incomplete" and have(part, entry) == 0
    part.write_bytes(b"x" * 10)
    assert have(part, entry) == 10
    part.write_bytes(b"x" * 11)
    assert have(part, entry) == 0
