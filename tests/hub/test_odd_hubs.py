"""Hubs as they are on a release morning: busy, slow, renamed, mirrored, with more than one index."""

import time
from pathlib import Path

import pytest

from dz.cli.main import main
from dz.errors import EnvironmentFailure, Refused, UsageError
from dz.hub import acquire, audit, client, resolve
from dz.weights.table import read_table

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


def fetch(request, base, progress=None):
    return acquire.fetch(request, workspace=base, progress=progress)


@pytest.mark.parametrize("metadata", [False, True])
def test_a_renamed_repository_redirects(hub, ask, base, made, metadata):
    """As the hub does: every old address answers with the new one, and the token stays with the host."""
    files = made.model()
    hub.push("org/better", files)
    hub.repos["org/better"].token = "hf_secretsecret"
    hub.push("org/name", files)
    hub.repos["org/name"].moved_to = "org/better"
    done = fetch(ask(token="hf_secretsecret", metadata=metadata), base)
    assert "org/name is called org/better now" in done.document["reasons"]
    assert done.source.name == "org/name" and len(read_table(done.source).entries) == 6
    cdn = [r for r in hub.requests if r.path.startswith("/cdn/")]
    assert cdn and not any(r.auth for r in cdn)


def test_a_redirect_to_where_nobody_is(hub, ask, base, made):
    hub.push("org/name", made.model())
    hub.fault(SHARD, "away", times=99)
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask(metadata=True), base)
    assert e.value.code == "connection" and SHARD in e.value.what
    assert made.server.SECRET not in "".join(e.value.lines())


@pytest.mark.parametrize("metadata", [False, True])
def test_a_busy_hub_says_how_long_to_wait(hub, ask, base, made, monkeypatch, metadata):
    waited = []
    monkeypatch.setattr(client.time, "sleep", waited.append)
    hub.push("org/name", made.model())
    hub.fault("info", "status", status=429, headers={"Retry-After": "7"})
    assert not fetch(ask(metadata=metadata), base).fresh
    assert [w for w in waited if w >= 1] == [7.0]


def test_a_hub_that_stays_silent_is_given_up(hub, ask, base, made, monkeypatch):
    monkeypatch.setattr(client, "TIMEOUT", 0.1)
    hub.push("org/name", made.model())
    hub.fault(SHARD, "slow", times=99, seconds=0.5)
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure) as e:
        fetch(ask(metadata=True), base)
    assert e.value.code == "connection" and time.monotonic() - began < 20


def test_a_file_longer_than_listed(hub, ask, base, made):
    files = made.model()
    hub.push("org/name", files)
    hub.fault(SHARD, "longer", times=9)
    with pytest.raises((Refused, EnvironmentFailure)) as e:
        fetch(ask(), base)
    assert SHARD in "".join(e.value.lines())
    assert not list(base.glob("*/fetch.json"))


def test_a_mirror_by_its_variable(hub, base, made, monkeypatch, tmp_path, capsys):
    """HF_ENDPOINT as people set it, with a slash at the end; the lock says where the bytes came from."""
    hub.push("org/name", made.model())
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["fetch", "org/name", "--workspace", str(base), "--json"]) == 0
    capsys.readouterr()
    assert f'"endpoint": "{hub.url}"' in next(base.glob("*/fetch.json")).read_text()


@pytest.mark.parametrize("more", [[], ["--metadata"]])
def test_a_traceback_shows_no_credential(hub, base, made, monkeypatch, tmp_path, capsys, more):
    """With -vv the client's own exceptions are shown; a signed address in them carries no signature."""
    monkeypatch.setattr("dz.hub.partial.LARGE", 1)
    hub.push("org/name", made.model())
    hub.repos["org/name"].token = "hf_secretsecret"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.cdn_fails = True
    argv = ["-vv", "fetch", "org/name", "--workspace", str(base), "--token", "hf_secretsecret", *more]
    assert main(argv) == EnvironmentFailure.exit_code
    out = "".join(capsys.readouterr())
    assert "Traceback" in out and "/cdn/" in out
    assert made.server.SECRET not in out and "hf_secretsecret" not in out


TWO = ("model.bf16.safetensors.index.json", "model.fp8.safetensors.index.json")


@pytest.fixture
def two_indexes(made):
    """A repository with a model in two precisions, and no index of the plain name."""
    files = made.model()
    for s in range(3):
        files[f"fp8-{s}.safetensors"] = made.safetensors({f"layers.{s}.a.weight": ("F8_E4M3", (7, 5 + s))})
    names = {f"layers.{s}.a.weight": f"fp8-{s}.safetensors" for s in range(3)}
    files[TWO[0]] = files.pop(INDEX)
    files[TWO[1]] = ('{"metadata": {}, "weight_map": ' + str(names).replace("'", '"') + "}").encode()
    return files


@pytest.mark.parametrize("metadata", [False, True])
def test_several_indexes_are_told_apart_by_the_globs(hub, ask, base, two_indexes, metadata):
    hub.push("org/name", two_indexes)
    with pytest.raises(Refused) as e:
        fetch(ask(metadata=metadata), base)
    assert (
        e.value.code == "ambiguous_index" and e.value.next == f"leave the others out: dz fetch MODEL --exclude {TWO[1]}"
    )
    done = fetch(ask(exclude=(TWO[0],), metadata=metadata), base)
    source = resolve("org/name", workspace=base, headers=True)
    assert set(read_table(source).entries) == {f"layers.{s}.a.weight" for s in range(3)}
    assert not [f for f in done.source.files if f.path.startswith("model-")]
    assert not audit("org/name", workspace=base).faults
    assert fetch(ask(exclude=(TWO[0],), metadata=metadata), base).fresh


def test_verify_on_the_command_line(hub, base, made, monkeypatch, tmp_path, capsys):
    folder = made.lay(tmp_path / "m", made.model())
    monkeypatch.setenv("DZ_WORKSPACE", str(base))
    assert main(["fetch", str(folder), "--verify"]) == 0
    out = capsys.readouterr()
    assert out.out == f"{folder}\n" and "7 files are right" in out.err and "7 hashed for the first time" in out.err
    for more in (["--metadata"], ["--include", "*"], ["--force"], ["--dry-run"], ["--local-dir", "x"]):
        assert main(["fetch", str(folder), "--verify", *more]) == UsageError.exit_code
        assert more[0] in capsys.readouterr().err
    assert main(["fetch", "org/never", "--verify"]) == UsageError.exit_code


def test_headers_on_the_command_line(hub, base, made, monkeypatch, tmp_path, capsys):
    hub.push("org/name", made.model())
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("DZ_WORKSPACE", str(base))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["fetch", "org/name", "--metadata", "--dry-run"]) == 0
    assert f"{SHARD}.header" in capsys.readouterr().out
    assert main(["fetch", "org/name", "--metadata"]) == 0
    out = capsys.readouterr()
    assert Path(out.out.strip()).is_dir() and "headers of 3 weight files, 6 tensors" in out.err
    assert "hint: dz adapt org/name --dry-run" in out.err
    for command in (["serve", "org/name"], ["accept", "org/name"], ["adapt", "org/name"]):
        assert main(command) == Refused.exit_code
        lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith(("error:", "  why:", "  next:"))]
        assert len(lines) == 3 and "only their headers" in lines[0] and "next: dz fetch org/name@" in lines[2]
    assert main(["ls"]) == 0 and "on the hub, headers here" in capsys.readouterr().out
    assert main(["show", "org/name"]) == 0 and "on the hub, headers here" in capsys.readouterr().out
    assert main(["fetch", "org/name", "--verify"]) == 0
