"""`dz adapt MODEL --diff`: the table, what it says of a site that is not known, and its document."""

from __future__ import annotations

import json

import pytest

from dz.cli import main
from dz.core.envelope import validate
from dz.inspect import index
from dz.upstream.sources import Sources, installed_sources


@pytest.fixture
def small(monkeypatch):
    """An index of one of upstream's files in the place of all."""
    found = installed_sources()
    files = {k: v for k, v in found.files.items() if k.endswith((".modeling_mamba2", ".modeling_clip"))}
    sources = Sources(found.root, found.version, files)
    monkeypatch.setattr(index, "load", lambda **_: index.Index(sources, index.build(sources)))


def run(capsys, *argv):
    code = main.main(["adapt", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_plain_decoder_is_all_known(tiny, tmp_path, small, capsys, monkeypatch):
    monkeypatch.setenv("DZ_WORKSPACE", str(tmp_path / "ws"))
    folder = tiny.write(tmp_path / "m", tiny.LLAMA)
    code, out, err = run(capsys, str(folder), "--diff", "-q")
    assert (code, out) == (0, "0\n"), err
    code, out, _ = run(capsys, str(folder), "--diff")
    assert "100.0 % of" in out
    assert "unknown:" not in out
    assert not list((tmp_path / "ws").rglob("plan.json"))


def test_what_is_not_known_is_explained(tiny, tmp_path, small, capsys, monkeypatch):
    monkeypatch.setenv("DZ_WORKSPACE", str(tmp_path / "ws"))
    folder = tiny.write(tmp_path / "m", {**tiny.HYBRID, "strange_key": 3}, weights=False)
    code, out, err = run(capsys, str(folder), "--diff")
    assert code == 0, err
    block = next(b for b in out.split("\n\n") if b.startswith("unknown: model.layers.*.conv"))
    for word in (
        "neighbour",
        "config",
        "inputs     hidden_states [1, 24, 40] float32",
        "state      recurrent",
        "write ",
    ):
        assert word in block
    assert "nothing reads `strange_key`" in err
    code, out, err = run(capsys, str(folder), "--diff", "--json")
    document = json.loads(out)
    validate(document)
    assert (code, document["status"]) == (0, "different")
    counts = document["data"]["counts"]
    assert counts["unknown"] == sum(s["status"] == "unknown" for s in document["data"]["sites"]) > 0
    assert document["data"]["unread"] == ["strange_key"]
    assert len(document["reasons"]) == counts["unknown"] + counts["variant"]


def test_flags_that_would_not_be_heeded_are_refused(tiny, tmp_path, capsys):
    folder = tiny.write(tmp_path / "m", tiny.LLAMA, weights=False)
    code, _, err = run(capsys, str(folder), "--diff", "--set", "rms_norm=upstream", "--device", "cpu")
    assert code == 2
    assert "--diff with --set, --device" in err
