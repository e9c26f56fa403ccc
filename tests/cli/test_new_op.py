"""`dz ops new`: the skeleton runs, fails until it is written, and passes once it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dz as package
from dz.core.envelope import validate
from dz.core.registry import Registry
from dz.errors import Refused

ROOT = Path(package.__file__).resolve().parents[1]
INPUTS = '''def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases."""
    m = Maker(dtype, device, seed)
    for t in (0, 1, 2, 7, 33):
        yield Case(f"t{t}", {"x": m.normal(t, 5), "decay": m.normal(5, scale=0.1)})
    yield Case("strided", {"x": m.normal(9, 10)[:, ::2], "decay": m.normal(5, scale=0.1)})


'''
SECOND = '''def second(x, decay):
    """Token by token."""
    return torch.stack([(x[: i + 1] * decay).sum(0) for i in range(len(x))]) if len(x) else x
'''
RECOGNISED = '''def test_its_module_is_recognised_and_another_is_not():
    """It takes nothing yet, and says so."""
    assert OP.recognise(None) is None
'''


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DZ_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(folder)]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_skeleton_fails_until_it_is_written(dz, tmp_path):
    code, out, err = dz("ops", "new", "gated_scan", "--args", "x,decay", "--into", str(tmp_path / "mine"))
    assert code == 0, err
    op, test = map(Path, out.split())
    assert (op, test) == (tmp_path / "mine/ops/gated_scan.py", tmp_path / "mine/tests/test_gated_scan.py")
    assert "pytest" in err
    done = run_tests(tmp_path / "mine")
    assert done.returncode == 1, done.stdout  # 1: tests ran and failed; 2 would be a file that does not import
    assert "gated_scan: the reference is not written" in done.stdout
    assert re.search(r"\b7 failed", done.stdout), done.stdout

    text = op.read_text()
    body = "return (x.float() * decay.float()).cumsum(0).to(x.dtype)"
    text = text.replace('raise NotImplementedError("gated_scan: the reference is not written")', body)
    text = text.replace("formula go here", "formula: here")
    start, end = text.index("def inputs"), text.index("def recognise")
    op.write_text(text[:start] + INPUTS + text[end:])
    text = test.read_text()
    start, end = text.index("def second"), text.index("def test_there_are_cases")
    text = text[:start] + SECOND + "\n\n" + text[end:]
    start, end = text.index("def test_its_module"), text.index("def test_it_says")
    test.write_text(text[:start] + RECOGNISED + "\n\n" + text[end:])
    done = run_tests(tmp_path / "mine")
    assert done.returncode == 0, done.stdout


def test_the_document(dz, tmp_path):
    code, out, _ = dz("ops", "new", "fresh", "--into", str(tmp_path), "--kind", "function", "--json")
    document = json.loads(out)
    validate(document)
    assert (code, document["data"]["op"], document["data"]["kind"]) == (0, "fresh", "function")
    assert all(Path(f).is_file() for f in document["data"]["files"])


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("Bad-Name",), 2, "cannot name an op"),
        (("class",), 2, "cannot name an op"),
        (("a" * 300,), 2, "cannot name an op"),
        (("fine", "--args", "a,b c"), 2, "'b c' cannot name an argument"),
        (("fine", "--args", "a,b,a"), 2, "names a twice"),
        (("fine", "--kind", "thing"), 2, "unknown kind 'thing'"),
        (("rms_norm",), 1, "there is an op 'rms_norm'"),
    ],
)
def test_what_cannot_be_is_said(dz, tmp_path, argv, code, words):
    got, _, err = dz("ops", "new", *argv, "--into", str(tmp_path))
    assert (got, words in err) == (code, True), err
    assert not list(tmp_path.rglob("*.py"))


def test_nothing_is_written_over(dz, tmp_path):
    assert dz("ops", "new", "twice", "--into", str(tmp_path))[0] == 0
    code, _, err = dz("ops", "new", "twice", "--into", str(tmp_path))
    assert code == 1
    assert "already there" in err


def test_ops_outside_are_found_and_twins_refused(tmp_path, monkeypatch, dz):
    assert dz("ops", "new", "of_mine", "--into", str(tmp_path))[0] == 0
    monkeypatch.setenv("DZ_PATH", str(tmp_path))
    assert "of_mine" in Registry.discover().ops
    (tmp_path / "ops/broken_one.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(Refused, match="broken_one"):
        Registry.discover()
    (tmp_path / "ops/broken_one.py").rename(tmp_path / "ops/rms_norm.py")
    with pytest.raises(Refused, match="'rms_norm' is there twice"):
        Registry.discover()
    monkeypatch.delenv("DZ_PATH")
    sys.modules.pop("dz.ops.of_mine", None)
    assert "of_mine" not in Registry.discover().ops


def test_without_checkout_or_folder_there_is_no_place(dz, monkeypatch):
    from dz.core import skeleton

    monkeypatch.setattr(skeleton, "checkout", lambda: None)
    code, _, err = dz("ops", "new", "homeless")
    assert code == 2
    assert "--into DIR" in err
