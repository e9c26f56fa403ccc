"""`dz adapt --dry-run --device NAME[xN]`: what is printed, and what the exit code says."""

import json

import pytest

from dz.core.envelope import validate


@pytest.fixture
def model(giant, tmp_path):
    folder = tmp_path / "model"
    giant.write(folder, *giant.scrambled(3, layers=3, experts=8))
    return str(folder)


def test_the_tables(dz, model):
    code, out, err = dz("adapt", model, "--dry-run", "--device", "H200x2")
    assert code == 0
    tables = [t.splitlines()[0].split()[0] for t in out.split("\n\n")]
    assert tables == ["OP", "FORMAT", "CACHE", "SPLIT", "OP"]
    assert "EP2 TP2" in out and "reference (slow, exact)" in out and "fits (EP2 TP2): up to 65,536 tokens" in out
    assert "read without a class: unknown architecture" in err and "hint: dz adapt" in err
    assert all(not line.endswith(" ") for line in out.splitlines())


def test_one_document(dz, model):
    code, out, _ = dz("adapt", model, "--dry-run", "--device", "h200 x2", "--json")
    document = json.loads(out)
    validate(document)
    assert (code, document["schema"], document["status"]) == (0, "dz.fit/1", "fits")
    assert document["inputs"]["device"] == "H200 x2" and document["data"]["device"]["count"] == 2


def test_the_honest_no(dz, giant, tmp_path):
    folder = tmp_path / "large"
    giant.write(folder, *giant.trillion(layers=9, experts=896))
    code, out, _ = dz("adapt", str(folder), "--dry-run", "--device", "L40S")
    assert code == 1
    assert "no: weights alone lack" in out and "On L40S x1 it does not fit" in out
    code, out, _ = dz("adapt", str(folder), "--dry-run", "--device", "L40S", "-q")
    assert (code, out) == (1, "does not fit\n")


def test_a_configuration_alone_is_an_estimate(dz, model, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    code, out, err = dz("adapt", str(tmp_path / "bare"), "--dry-run", "--device", "H200")
    assert code == 0 and "an estimate: weights within 10 %" in err and "fp8" in out


def test_an_unknown_profile_suggests(dz, model):
    code, _, err = dz("adapt", model, "--dry-run", "--device", "MI30X")
    assert code == 2 and "did you mean 'MI300X'?" in err


@pytest.mark.parametrize("more", [("--set", "rms_norm=reference"), ("--recipe", "default"), ("--check",)])
def test_flags_that_a_fit_would_not_heed_are_refused(dz, model, more):
    code, _, err = dz("adapt", model, "--dry-run", "--device", "H200x2", *more)
    assert code == 2 and f"with {more[0]}" in err
