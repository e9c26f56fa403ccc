"""The chain against a stand-in for `python -m dz`, which lies first on the path of the demo's working folder."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from dz.core.envelope import envelope, validate
from dz.core.protocols import Silent
from dz.demo import run
from dz.demo.steps import Shell, end


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Run the chain with the stand-in told what to do; gives the steps by name."""

    def go(**fake):
        package = tmp_path / "dz"
        package.mkdir()
        (package / "__init__.py").touch()
        shutil.copyfile(Path(__file__).with_name("fake_dz.py"), package / "__main__.py")
        monkeypatch.setenv("FAKE", json.dumps(fake))
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        return run.run(tmp_path, Silent())

    return go


def by_name(steps):
    return {s.name: s for s in steps}


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_all_is_well(chain, tmp_path):
    steps = chain()
    assert [s.name for s in steps] == [
        "build",
        "fetch",
        "fit",
        "diff",
        "adapt",
        "accept",
        "serve",
        "chat",
        "image",
        "kernels",
    ]
    assert all(s.status == "ok" for s in steps), steps
    assert run.exit_code(steps) == 0
    got = by_name(steps)
    assert got["fetch"].figures["tensors"] == 167 and got["fetch"].command == "dz fetch ./acorn-2m"
    assert got["fit"].command == "dz adapt ./acorn-2m --dry-run --device H200 --json"
    assert (got["fit"].figures["longest"], got["fit"].figures["code_files"], got["fit"].figures["findings"]) == (
        2048,
        2,
        0,
    )
    assert "no code was run" in got["fit"].text and "F32 and mxfp4" in got["fit"].text
    assert got["diff"].figures["nearest"] == (0.5, "mixer", "Near") and "50% of Near" in got["diff"].text
    adapted = got["adapt"].figures
    assert (adapted["known"], adapted["variant"], adapted["unknown"]) == (1, 0, 1)
    assert (adapted["choices"], adapted["choices_verified"], adapted["tensors_unaccounted"]) == (2, 1, 1)
    assert got["accept"].figures["pass"] == ["load"]
    assert got["image"].figures["image_tokens"] == 8
    assert got["kernels"].figures == {"calls": {"op/fast": 7}, "steps": {"mixed": 4}, "never_called": []}
    assert not alive(int((tmp_path / "server.pid").read_text()))
    data = {"folder": None, "seconds": 1.0, "steps": steps}
    validate(envelope("demo", data))


@pytest.mark.parametrize(("name", "code"), [("fetch", 3), ("fit", 1), ("diff", 2), ("adapt", 1)])
def test_a_failed_command_ends_the_chain(chain, name, code):
    steps = chain(**{name: code})
    assert run.exit_code(steps) == code
    after = steps[[s.name for s in steps].index(name) + 1 :]
    assert after and all(s.status == "not run" and s.reason == f"{name} failed" for s in after)
    assert run.first_line(by_name(steps)[name]) == f"error: {name} said no"


def test_a_failed_check_counts_but_the_model_is_still_served(chain):
    steps = chain(accept=1)
    assert run.exit_code(steps) == 1
    got = by_name(steps)
    assert got["accept"].status == "fail" and got["accept"].figures["fail"] == ["image"]
    assert got["chat"].status == "ok"


@pytest.mark.parametrize("name", ["fetch", "adapt", "accept"])
def test_a_command_that_leaves_no_document_failed(chain, name):
    steps = chain(**{f"no_{name}": True})
    assert run.exit_code(steps) == 1
    step = by_name(steps)[name]
    assert step.status == "fail" and "found nothing" in step.reason


def test_a_server_that_ends_is_told(chain):
    steps = chain(serve=3)
    assert run.exit_code(steps) == 3 and steps[-1].name == "serve"
    assert run.first_line(steps[-1]) == "error: serve said no"


@pytest.mark.parametrize(
    ("fake", "name", "why"),
    [
        ({"blind": True}, "image", "same answer"),
        ({"tokens": 3}, "chat", "not whole"),
        ({"calls": 0}, "kernels", "never called: op/fast"),
    ],
)
def test_a_bad_answer_is_a_failure(chain, fake, name, why):
    steps = chain(**fake)
    assert run.exit_code(steps) == 1
    assert {s.name for s in steps if s.status == "fail"} == {name}
    assert why in by_name(steps)[name].reason


def test_a_command_without_end_is_killed(chain, monkeypatch):
    monkeypatch.setattr(run, "COMMAND_LIMIT", 1.0)
    steps = chain(sleep="fetch")
    assert by_name(steps)["fetch"].reason.startswith("no end after 1 s") and run.exit_code(steps) == 1


def test_what_a_process_started_ends_with_it(tmp_path):
    (tmp_path / "dz").mkdir()
    (tmp_path / "dz" / "__init__.py").touch()
    code = "import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', 'import signal, time\\n"
    code += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\nprint(1, flush=True)\\ntime.sleep(60)'], stdout=-1)\n"
    code += "p.stdout.readline()\nopen('child', 'w').write(str(p.pid))\ntime.sleep(60)\n"
    (tmp_path / "dz" / "__main__.py").write_text(code)
    process = Shell.at(tmp_path).start("x", [])
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.05)
    end(process, grace=0.5)
    time.sleep(0.2)
    state = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
