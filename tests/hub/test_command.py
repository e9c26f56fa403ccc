"""`dz fetch` as people run it: stdout, stderr, exit codes, --json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dz.cli.main import main
from dz.core.envelope import validate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dz(hub, base, tmp_path, monkeypatch, capsys):
    """Run a command line in this process against the loopback hub: (exit code, stdout, stderr)."""
    monkeypatch.setenv("DZ_HF_ENDPOINT", hub.url)
    monkeypatch.setenv("DZ_WORKSPACE", str(base))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*argv: str):
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def test_prints_the_folder_and_then_is_up_to_date(dz, hub, made, tmp_path):
    commit = hub.push("org/name", made.model())
    code, out, err = dz("fetch", "org/name")
    folder = tmp_path / "cache" / "models--org--name" / "snapshots" / commit
    assert code == 0 and out == f"{folder}\n" and "7 files checked" in err and "hint: dz adapt org/name" in err
    code, out, err = dz("fetch", "org/name")
    assert code == 0 and out == f"{folder}\n" and f"fetch: up to date (commit {commit})" in err
    assert dz("fetch", "org/name", "-q") == (0, f"{folder}\n", "")


def test_json_is_one_document(dz, hub, made):
    hub.push("org/name", made.model())
    for argv in (["fetch", "org/name", "--json"], ["fetch", "org/name@main", "--json", "--dry-run"]):
        code, out, _ = dz(*argv)
        document = json.loads(out)
        validate(document)
        assert code == 0 and document["schema"] == "dz.fetch/1"
    code, out, _ = dz("fetch", "org/none", "--json", "--token", "hf_abcdefgh")
    document = json.loads(out)
    validate(document)
    assert code == document["exit_code"] == 3 and document["code"] == "not_found" and "hf_abcdefgh" not in out


def test_dry_run(dz, hub, made, base, tmp_path):
    hub.push("org/name", made.model() | {"pytorch_model.bin": b"x" * 1500})
    code, out, _ = dz("fetch", "org/name", "--dry-run")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 0 and rows["FILE"] == ["BYTES", "CACHED"] and rows["config.json"][1] == "no"
    assert "not fetched: pytorch_model.bin (1.5 kB;" in out
    assert not base.exists() and not (tmp_path / "cache").exists()


def test_a_dry_run_that_would_not_fit(dz, hub, made, monkeypatch):
    hub.push("org/name", made.model())
    monkeypatch.setattr(
        "os.statvfs", lambda p: type("S", (), {"f_bavail": 1, "f_frsize": 1, "f_blocks": 1, "f_bfree": 1})()
    )
    code, _, err = dz("fetch", "org/name", "--dry-run")
    assert code == 3 and "would be refused" in err


def test_a_broken_folder_exits_1_with_three_lines(dz, made, tmp_path):
    folder = made.lay(tmp_path / "m", made.model())
    (folder / "model-00001-of-00003.safetensors").unlink()
    code, out, err = dz("fetch", "./m")
    assert code == 1 and out == ""
    lines = [line for line in err.splitlines() if line.startswith(("error:", "  why:", "  next:"))]
    assert len(lines) == 3 and "incomplete download" in lines[0] and "model-00001-of-00003.safetensors" in lines[1]


def test_usage_errors_exit_2(dz, tmp_path):
    (tmp_path / "m").mkdir()
    for argv in (["fetch", "a/b/c"], ["fetch", "./m", "--revision", "x"], ["fetch", "./m", "--dry-run"], ["fetch"]):
        assert dz(*argv)[0] == 2, argv


def test_offline_by_flag_and_by_variable(dz, hub, made, monkeypatch):
    hub.push("org/name", made.model())
    assert dz("fetch", "org/name", "--offline")[0] == 3 and not hub.requests
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert dz("fetch", "org/name")[0] == 3 and not hub.requests


def test_a_rerun_takes_under_a_second_and_no_torch(made, base, tmp_path):
    folder = made.lay(tmp_path / "m", made.model())
    env = {**os.environ, "DZ_WORKSPACE": str(base), "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, "-m", "dz", "fetch", str(folder)]
    subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
    out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=20)
    imported = {line.rpartition("|")[2].strip() for line in out.stderr.splitlines() if line.startswith("import time:")}
    assert "dz.hub.acquire" in imported and not imported & {"torch", "transformers", "huggingface_hub"}
    assert "up to date" in out.stderr
