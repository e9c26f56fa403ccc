"""The runner with real checks on the fake server as a process: resume, selection, interruption, what goes wrong."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dz.accept import accept, check, runner
from dz.accept.check import Check, passed, skipped
from dz.accept.client import AnswerError
from dz.accept.report import earlier
from dz.accept.runner import Choice
from dz.core import jsonio
from dz.core.check import load_checklist
from dz.core.envelope import validate
from dz.errors import EnvironmentFailure, Refused, UsageError


@dataclass(frozen=True)
class Params:
    depth: int = 1


@pytest.fixture
def ran():
    return []


@pytest.fixture
def world(context, ran, tmp_path, monkeypatch):
    """run(choice, **outcomes): run a list of three fake checks; outcomes are statuses or exceptions."""
    outcomes = {}

    def body(name):
        def run(ctx, params):
            ran.append(name)
            outcome = outcomes.get(name, "pass")
            if isinstance(outcome, BaseException):
                raise outcome
            return {"pass": passed, "fail": check.failed, "skip": skipped, "moot": lambda r: skipped(r, applies=False)}[
                outcome
            ](name)

        return run

    known = {n: Check(id=n, summary=f"{n}.", params=Params, run=body(n)) for n in ("one", "two", "three")}
    known["two"] = replace(known["two"], needs=("server",))
    monkeypatch.setattr(runner, "discover", lambda: known)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "checks: [{check: one}, {check: two, params: {depth: 3}}, {check: three, id: last, required: false}]"
    )
    ctx = replace(context(), name="mine")
    about = {
        "model": "m",
        "rev8": "01234567",
        "checklist": "mine",
        "plan": "",
        "device": "cpu",
        "dtype": "float32",
        "versions": {},
    }

    def run(choice=Choice(), base="b", context=ctx, **given):
        outcomes.clear()
        outcomes.update(given)
        ran.clear()
        told = []
        report, results = runner.run(
            context,
            load_checklist(path),
            choice,
            about,
            base=base,
            told=lambda r, kept: told.append((r.id, r.status, kept)),
        )
        document = jsonio.read(context.workspace.report("mine"))
        validate(document)
        return report, results, told, document

    run.path, run.ctx = path, ctx
    return run


def test_all_run_in_order(world, ran):
    report, results, told, document = world(two="fail")
    assert ran == ["one", "two", "three"] and report.verdict == document["status"] == "fail"
    assert [r.id for r in results] == ["one", "two", "last"] and [r.required for r in results] == [True, True, False]
    assert told == [("one", "pass", False), ("two", "fail", False), ("last", "pass", False)]


def test_resume_keeps_what_is_true(world, ran):
    world(two="fail")
    report, _, told, _ = world()
    assert ran == [] and report.verdict == "fail" and all(kept for _, _, kept in told)
    world(Choice(resume=False))
    assert ran == ["one", "two", "three"]


@pytest.mark.parametrize("outcome", ["skip", RuntimeError("x"), Refused("a", "b", "c")])
def test_what_found_nothing_out_is_tried_again(world, ran, outcome):
    world(two=outcome)
    world()
    assert ran == ["two"]


def test_changed_inputs_run_again(world, ran):
    world()
    world(base="other")
    assert ran == ["one", "two", "three"]
    world.path.write_text(world.path.read_text().replace("depth: 3", "depth: 4"))
    world(base="other")
    assert ran == ["two"]


def test_last_failed(world, ran):
    world(two="fail", three="skip")
    world(Choice(last_failed=True), two="fail")
    assert ran == ["two"]
    world(Choice(last_failed=True))
    assert ran == ["two"]
    report, results, _, _ = world(Choice(last_failed=True))
    assert ran == ["three"] and len(results) == 3 and report.verdict == "pass"  # all; the skip is tried again


def test_selection_keeps_the_rest_of_the_report(world, ran):
    world()
    report, results, _, _ = world(Choice(expression="one", resume=False), one="fail")
    assert ran == ["one"] and [r.id for r in results] == ["one"]
    assert [r.status for r in report.results] == ["fail", "pass", "pass"]


def test_a_selection_alone_is_incomplete(world):
    report, _, _, document = world(Choice(expression="last"))
    assert report.verdict == "incomplete" and document["data"]["missing"] == ["one", "two"]


@pytest.mark.parametrize(("maxfail", "want"), [(1, ["one"]), (2, ["one", "two"]), (0, ["one", "two", "three"])])
def test_maxfail(world, ran, maxfail, want):
    world(Choice(maxfail=maxfail), one="fail", two="fail", three="fail")
    assert ran == want


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [
        (AnswerError("the server answers 500", "broke"), "fail", "the server answers 500: broke"),
        (EnvironmentFailure("does not fit", "9 B", "-"), "skip", "does not fit: 9 B"),
        (Refused("not causal", "why", "-"), "error", "not causal: why"),
        (ZeroDivisionError("oops"), "error", "ZeroDivisionError: oops"),
    ],
)
def test_what_goes_wrong_is_a_result(world, raised, status, words):
    _, results, _, _ = world(one=raised)
    assert (results[0].status, results[0].reason) == (status, words) and len(results) == 3
    if isinstance(raised, ZeroDivisionError):
        (trace,) = results[0].evidence
        assert "ZeroDivisionError" in (world.ctx.workspace.folder / trace).read_text()


def test_what_does_not_apply_does_not_count(world):
    report, results, _, _ = world(one="moot")
    assert results[0].status == "skip" and not results[0].required and report.verdict == "pass"
    assert world(Choice(resume=False), one="skip")[0].verdict == "fail"


def test_no_server_skips_what_needs_one(world, ran, context):
    dead = replace(context({"no_start": 1}, process=True), name="mine")
    _, results, _, _ = world(context=dead)
    assert ran == ["one", "three"] and results[1].status == "skip"
    assert "the weights are incomplete: 1 tensor is missing: a.weight" in results[1].reason


def test_an_interruption_keeps_what_is_finished(world, ran):
    with pytest.raises(KeyboardInterrupt):
        world(two=KeyboardInterrupt())
    assert list(earlier(world.ctx.workspace.report("mine"))) == ["one"]
    world()
    assert ran == ["two", "three"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{check: tow}", "did you mean 'two'"),
        ("{check: one, params: {dept: 2}}", "did you mean depth"),
        ("{check: one, params: {depth: deep}}", "int"),
    ],
)
def test_mistakes_in_the_list_are_told_before_anything_runs(world, ran, line, words):
    world.path.write_text(f"checks: [{{check: one, id: first}}, {line}]")
    with pytest.raises(UsageError) as e:
        world()
    assert words in e.value.why and ran == []


def test_shipped_lists_are_valid():
    for name in ("default", "quick"):
        assert runner.lines(accept.checklist_of(name))


SCRIPT = """
import sys, threading, time
sys.path.insert(0, {here!r})
from dz.accept.accept import _terminable
from dz.accept.server import Own
from pathlib import Path
server = Own([sys.executable, {fake!r}], Path({log!r}))
try:
    with _terminable():
        server.client()
        print("up", server.pid, flush=True)
        time.sleep(60)
finally:
    server.stop()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_with_us(tmp_path, number):
    here = Path(__file__).parent
    code = SCRIPT.format(here=str(here.parents[1]), fake=str(here / "fake_server.py"), log=str(tmp_path / "server.log"))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        process.send_signal(number)
        process.wait(20)
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_json_of_a_report_is_one_document(world):
    _, _, _, document = world()
    assert json.loads(json.dumps(document)) == document
