"""Field failures R01 to R08: the first days of a model as people met them, one test each and what goes with it.

The real hub client, a hub on loopback, the command line as people type it."""

import json
import os
import re
import struct
from math import prod
from pathlib import Path

import pytest

from dz.cli.main import main
from dz.core.headers import BITS, read_kept
from dz.hub import resolve
from dz.weights.table import read_table

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def dz(hub, base, tmp_path, monkeypatch, capsys):
    """Run a command line in this process against the loopback hub: (exit code, stdout, stderr)."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("DZ_WORKSPACE", str(base))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*argv: str):
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def three_lines(err):
    """The three lines of an error."""
    lines = [line for line in err.splitlines() if line.startswith(("error:", "  why:", "  next:"))]
    assert len(lines) == 3, err
    return lines


def fetched(hub):
    """The files whose content was asked for."""
    return {Path(r.path).name for r in hub.content_gets()}


def test_r01_a_shard_that_never_arrived(dz, hub, made, base, tmp_path):
    """The index names three shards, two are there: no command that loads goes on, and all name the third."""
    hub.push("org/name", made.model())
    _, there, _ = dz("fetch", "org/name", "-q")
    for path in ((Path(there.strip()) / SHARD).resolve(), Path(there.strip()) / SHARD):
        path.unlink()
    hub.requests.clear()
    assert dz("fetch", "org/name")[0] == 0 and fetched(hub) == {SHARD, INDEX}
    folder = made.lay(tmp_path / "m", made.model())
    (folder / SHARD).unlink()
    (Path(there.strip()) / SHARD).unlink()
    for command in (
        ["fetch", "./m"],
        ["serve", "./m", "--load-only"],
        ["adapt", "./m", "--dry-run"],
        ["accept", "./m"],
    ):
        code, out, err = dz(*command)
        what, why, _ = three_lines(err)
        assert code == 1 and not out, command
        assert "incomplete download" in what and "1 of 3 weight files" in what and SHARD in why
    for command in (["serve", "org/name", "--load-only"], ["adapt", "org/name"]):
        code, _, err = dz(*command)
        assert code == 1 and f"{SHARD} is gone" in three_lines(err)[1]


# the second shard of made_up: two tensors, of 7 x 6 x 4 and 11 x 2 bytes
@pytest.mark.parametrize("cut", [1, 22, 22 + 100, 22 + 7 * 6 * 4 + 10])
def test_r02_a_shard_cut_by_a_byte_a_tensor_or_in_its_header(dz, hub, made, tmp_path, cut):
    """Refused on the disk and, by its header and the listed size alone, before it is downloaded."""
    files = made.model()
    size = len(files[SHARD])
    files[SHARD] = files[SHARD][:-cut]
    made.lay(tmp_path / "m", files)
    hub.push("org/name", files)
    for command in (["fetch", "./m"], ["fetch", "org/name", "--metadata"]):
        code, _, err = dz(*command)
        _, why, _ = three_lines(err)
        assert code == 1 and SHARD in why and f"{size - cut:,}" in why
        header = struct.unpack("<Q", files[SHARD][:8])[0] + 8
        assert f"{size:,}" in why if size - cut >= header else f"{header:,}" in why


def test_r03_a_git_lfs_pointer_in_place_of_the_file(dz, hub, made, tmp_path):
    folder = made.lay(tmp_path / "m", made.model())
    (folder / SHARD).write_bytes(made.stub)
    (folder / "tokenizer.json").write_bytes(made.stub)
    code, _, err = dz("fetch", "./m")
    _, why, what_next = three_lines(err)
    assert code == 1 and why.count("git-LFS pointer") == 2 and why.count("123,456,789") == 2
    assert SHARD in why and "tokenizer.json" in why and "fetch" in what_next
    assert dz("fetch", "./m", "--verify")[0] == 1
    files = made.model() | {SHARD: made.stub}
    hub.push("org/name", files)  # the publisher committed the pointer
    code, _, err = dz("fetch", "org/name", "--metadata")
    assert code == 1 and "git-LFS pointer" in three_lines(err)[1]


def test_r04_the_size_is_right_and_the_bytes_are_wrong(dz, hub, made):
    """A byte flipped in the middle of a shard: --verify names that file alone, and the repair fetches it alone."""
    files = made.model()
    hub.push("org/name", files)
    _, there, _ = dz("fetch", "org/name", "-q")
    blob = (Path(there.strip()) / SHARD).resolve()
    when, content = blob.stat().st_mtime_ns, bytearray(files[SHARD])
    content[len(content) // 2] ^= 1
    blob.write_bytes(bytes(content))
    os.utime(blob, ns=(when, when))
    assert dz("fetch", "org/name")[0] == 0  # up to date, as far as times and sizes tell
    code, out, err = dz("fetch", "org/name", "--verify")
    assert code == 1 and [line.split(":")[0] for line in out.splitlines()] == [SHARD]
    assert "sha256" in out and "dz fetch org/name" in three_lines(err)[2]
    code, out, _ = dz("fetch", "org/name", "--verify", "--json")
    assert [f["file"] for f in json.loads(out)["faults"]] == [SHARD]
    hub.requests.clear()
    assert dz("fetch", "org/name")[0] == 0 and fetched(hub) == {SHARD, INDEX}
    assert dz("fetch", "org/name", "--verify")[0] == 0 and blob.read_bytes() == files[SHARD]


def test_r04_wrong_bytes_on_the_way_never_reach_the_cache(dz, hub, made, tmp_path, monkeypatch):
    monkeypatch.setattr("dz.hub.partial.LARGE", 1)
    hub.push("org/name", made.model())
    hub.fault(SHARD, "flip", times=9)
    code, _, err = dz("fetch", "org/name")
    assert code == 1 and SHARD in three_lines(err)[1]
    assert not [
        p for p in (tmp_path / "cache").rglob("*") if p.name.startswith(made.server.sha256(made.model()[SHARD]))
    ]


def with_header(n: int) -> bytes:
    """A weight file whose header is exactly `n` bytes long."""
    names = [f"layers.{i}.weight" for i in range((n - 100) // 90)]
    header = {t: {"dtype": "U8", "shape": [3], "data_offsets": [3 * i, 3 * i + 3]} for i, t in enumerate(names)}
    raw = json.dumps(header).encode()
    return struct.pack("<Q", n) + raw + b" " * (n - len(raw)) + bytes(3 * len(names))


@pytest.mark.parametrize("n", [99_991, 99_992, 99_993, 99_994, 99_995, 99_999, 100_000, 100_001])
@pytest.mark.parametrize("first", [64 << 10, 100_000, 100_008])
def test_r05_headers_of_every_length_by_range(hub, ask, base, monkeypatch, n, first):
    """Header lengths round the client's own 100,000, for first requests that end before, in and behind it."""
    from dz.hub import acquire

    monkeypatch.setattr("dz.hub.metadata.guess", lambda names: first)
    content = with_header(n)
    hub.push("org/name", {"config.json": b"{}", "model.safetensors": content})
    source = acquire.fetch(ask(metadata=True), workspace=base).source
    kept = source.at("model.safetensors").read_bytes()
    assert kept == content[: 8 + n]
    header = read_kept(source.at("model.safetensors"), len(content), "model.safetensors")
    assert header.header_bytes == n and len(read_table(source).entries) == len(header.tensors)
    asked = [r.range for r in hub.content_gets() if "/cdn/" in r.path]
    if 8 + n <= first:
        assert asked == [f"bytes=0-{min(first, len(content)) - 1}"]
    else:
        assert asked == [f"bytes=0-{first - 1}", f"bytes={first}-{8 + n - 1}"]


def test_r06_a_full_disk_is_said_first_and_on_the_right_mount(dz, hub, made, monkeypatch, tmp_path):
    hub.push("org/name", made.model())
    asked = []

    def small(path):
        asked.append(Path(path))
        return type("S", (), {"f_bavail": 2, "f_frsize": 10, "f_blocks": 9, "f_bfree": 2})()

    other = tmp_path / "other-disk"
    other.mkdir()
    (tmp_path / "link").symlink_to(other)
    need = sum(map(len, made.model().values()))
    with monkeypatch.context() as full:
        full.setattr("os.statvfs", small)
        code, _, err = dz("fetch", "org/name", "--local-dir", "link/model")
        what, why, _ = three_lines(err)
        assert code == 3 and f"{need:,} more bytes" in what and "20 bytes are free" in why and str(other) in why
        assert asked == [other] and fetched(hub) == {INDEX}
    assert dz("fetch", "org/name", "--local-dir", "link/model")[0] == 0
    for lock in (tmp_path / "reports").rglob("fetch.json"):
        lock.unlink()
    with monkeypatch.context() as full:
        full.setattr("os.statvfs", small)
        assert dz("fetch", "org/name", "--local-dir", "link/model")[0] == 0  # all there: no byte is needed


def test_r07_upstream_edits_the_repository_after_release(dz, hub, made, base):
    old = hub.push("org/name", made.model())
    _, first, _ = dz("fetch", "org/name", "-q")
    hub.push("org/name", made.model(seed=1))
    hub.requests.clear()
    assert dz("fetch", "org/name", "-q")[1] == first and not hub.requests
    source = resolve("org/name", workspace=base)
    assert source.commit == old and all(re.fullmatch("[0-9a-f]{64}", f.sha256) for f in source.files)
    code, _, err = dz("fetch", "org/name@main")
    assert code == 0 and f"main moved: {old[:8]} was locked before" in err
    assert (Path(first.strip()) / SHARD).read_bytes() == made.model()[SHARD]


def test_r07_a_folder_of_two_revisions(dz, hub, made, tmp_path):
    import huggingface_hub

    for files, patterns in ((made.model(), None), (made.model(seed=1), [SHARD])):
        hub.push("org/name", files)
        huggingface_hub.snapshot_download(
            "org/name", endpoint=hub.url, local_dir=tmp_path / "m", allow_patterns=patterns
        )
    code, out, err = dz("fetch", "./m", "--verify")
    assert code == 1 and out.startswith(f"{SHARD}: of commit") and len(out.splitlines()) == 1
    three_lines(err)
    assert "files of 2 different commits" in dz("fetch", "./m")[2]


def test_r08_duplicates_and_strays_are_neither_fetched_nor_opened(dz, hub, made, tmp_path, base, monkeypatch):
    files = made.model()
    stray = {
        "original/x.safetensors": made.safetensors({"x": ("U8", (3,))}),
        "model.safetensors": b"4 bit, and mixed in",
    }
    hub.push("org/name", files | stray)
    code, _, err = dz("fetch", "org/name")
    assert code == 0 and not fetched(hub) & {"x.safetensors", "model.safetensors"}
    document = json.loads(next(base.glob("org--name@*/fetch.json")).read_text())
    assert {i["path"] for i in document["data"]["ignored"]} == set(stray)
    made.lay(tmp_path / "m", files | stray)
    opened = []
    real = Path.open

    def spy(self, *args, **kwargs):
        opened.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", spy)
    code, _, err = dz("fetch", "./m")
    assert code == 0 and all(path in err for path in stray)
    read_table(resolve("./m", workspace=base))
    names = {p.relative_to(tmp_path / "m").as_posix() for p in opened if p.is_relative_to(tmp_path / "m")}
    assert {p for p in names if p.endswith(".safetensors")} == {p for p in files if p.endswith(".safetensors")}


def test_the_made_up_header_is_what_it_says():
    content = with_header(5000)
    assert struct.unpack("<Q", content[:8])[0] == 5000
    header = json.loads(content[8:5008])
    assert (
        content[8:5008].rstrip() != b"{}"
        and sum(prod(t["shape"]) * BITS[t["dtype"]] // 8 for t in header.values()) == len(content) - 5008
    )
