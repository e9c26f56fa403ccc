"""`dz doctor` and what it looks at."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from dz.cli import health
from dz.cli.health import Line
from dz.core.envelope import validate


def found(lines) -> dict[str, Line]:
    return {line.item: line for line in lines}


def test_a_whole_run(dz):
    code, out, _ = dz("doctor", "--json")
    document = json.loads(out)
    validate(document)
    lines = {line["item"]: line for line in document["data"]["lines"]}
    assert {
        "python",
        "torch",
        "transformers",
        "packages",
        "device",
        "processors",
        "ops",
        "kernels",
        "torchvision",
        "cache",
        "workspace",
        "hub",
    } <= set(lines)
    failed = any(line["status"] == "fail" for line in lines.values())
    assert code == (3 if failed else 0) and document["status"] == ("fail" if failed else "ok")
    assert all(line["next"] for line in lines.values() if line["status"] == "fail")


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 3)])
def test_verdict(dz, monkeypatch, status, code):
    monkeypatch.setattr(
        health, "examine", lambda settings: [Line("python", "ok", "3"), Line("disk", status, "full", "dz tidy")]
    )
    got, out, err = dz("doctor")
    assert got == code and out.splitlines()[2].split() == ["disk", status, "full"] and "hint: disk: dz tidy" in err
    assert dz("doctor", "-q")[1] == ("fail\n" if code else "ok\n")


def test_a_missing_package_fails_with_its_name(monkeypatch):
    real = metadata.version

    def version(name):
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(health.metadata, "version", version)
    line = found(health.packages())["torch"]
    assert line.status == "fail" and line.next == "pip install torch"


def test_requirements_are_names_of_this_platform():
    names = health.requirements()
    assert {"torch", "transformers", "typer", "nvidia-ml-py"} <= set(names)
    assert not {"pytest", "ray", "torchvision"} & set(names)
    assert all(set(n) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.") for n in names)


def test_disks(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache/hub"))
    usage = {"free": 100 * health.GB}
    monkeypatch.setattr(health.shutil, "disk_usage", lambda path: type("Usage", (), usage))
    lines = found(health.disks(tmp_path / "reports"))
    assert {line.status for line in lines.values()} == {"ok"} and "100 GB free" in lines["cache"].found
    usage["free"] = 5 * health.GB
    lines = found(health.disks(tmp_path / "reports"))
    assert lines["cache"].status == "warn" and "HF_HOME" in lines["cache"].next and lines["workspace"].status == "ok"
    monkeypatch.setattr(health.os, "access", lambda path, mode: Path(path) != tmp_path)
    assert found(health.disks(tmp_path / "reports"))["workspace"].status == "fail"


def test_the_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not asked" in found(health.hub("https://hub"))["hub"].found
    monkeypatch.delenv("HF_HUB_OFFLINE")
    line = found(health.hub("http://127.0.0.1:9"))["hub"]
    assert line.status == "warn" and "does not answer" in line.found and line.next


def test_torchvision(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(health.metadata, "version", absent)
    assert "install torchvision" in found(health.vision())["torchvision"].next
    monkeypatch.setattr(health.metadata, "version", lambda name: "9.9")
    monkeypatch.setitem(__import__("sys").modules, "torchvision", None)
    line = found(health.vision())["torchvision"]
    assert line.status == "warn" and "9.9 does not load" in line.found
