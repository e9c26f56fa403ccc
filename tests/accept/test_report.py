"""Verdicts, documents, JUnit."""

import xml.etree.ElementTree as ET

import pytest

from dz.accept.report import Done, Report, counts_against, earlier, junit, row
from dz.core import jsonio
from dz.core.check import Checklist, Entry, Result
from dz.core.envelope import validate

ABOUT = {
    "model": "org/toy",
    "rev8": "01234567",
    "checklist": "x",
    "plan": "",
    "device": "cpu",
    "dtype": "float32",
    "versions": {},
}
LIST = Checklist(name="x", checks=tuple(Entry(check=c) for c in ("a", "b", "c")))


def result(name, status="pass", required=True):
    return Result(
        id=name, status=status, reason="because <&>", required=required, value=0.123456, unit="s", seconds=1.5
    )


def report(**statuses):
    out = Report(checklist=LIST, about=ABOUT)
    for name, status in statuses.items():
        required = not status.endswith("?")
        out.done[name] = Done(result=result(name, status.rstrip("?"), required), inputs="0" * 32)
    return out


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ({"a": "pass", "b": "pass", "c": "pass"}, "pass"),
        ({"a": "pass", "b": "skip?", "c": "pass"}, "pass"),
        ({"a": "pass", "b": "skip", "c": "pass"}, "fail"),
        ({"a": "pass", "b": "fail?", "c": "pass"}, "fail"),
        ({"a": "pass", "b": "error", "c": "pass"}, "fail"),
        ({"a": "pass", "c": "pass"}, "incomplete"),
        ({"a": "fail", "c": "pass"}, "fail"),
        ({}, "incomplete"),
    ],
)
def test_verdicts(statuses, verdict):
    made = report(**statuses)
    assert made.verdict == verdict
    document = made.document()
    validate(document)
    assert document["status"] == verdict and sum(document["data"]["counts"].values()) == len(statuses)
    assert bool(document["reasons"]) == (verdict != "pass")


def test_results_stand_in_the_order_of_the_list_and_are_read_again(tmp_path):
    made = report(c="fail", a="pass")
    assert [r.id for r in made.results] == ["a", "c"] and made.missing == ["b"]
    jsonio.write(tmp_path / "report.json", made.document())
    found = earlier(tmp_path / "report.json")
    assert {n: d.result for n, d in found.items()} == {d.result.id: d.result for d in made.done.values()}
    assert all(d.kept and d.inputs == "0" * 32 for d in found.values())
    assert earlier(tmp_path / "none.json") == {}


def test_a_skip_counts_only_where_required():
    assert counts_against(result("a", "skip")) and not counts_against(result("a", "skip", required=False))
    assert counts_against(result("a", "error", required=False))


def test_junit(tmp_path):
    path = tmp_path / "deep" / "x.xml"
    junit(report(a="pass", b="fail"), path)
    suite = ET.parse(path).getroot().find("testsuite")
    assert suite is not None and (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    cases = {c.get("name"): c for c in suite.findall("testcase")}
    failure = cases["b"].find("failure")
    assert failure is not None and failure.get("message") == "because <&>"
    assert cases["a"].find("failure") is None and cases["c"].find("skipped") is not None
    assert cases["a"].get("time") == "1.5"


def test_junit_counts_a_required_skip_as_a_failure(tmp_path):
    junit(report(a="skip", b="skip?", c="error"), tmp_path / "x.xml")
    suite = ET.parse(tmp_path / "x.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("failures"), suite.get("skipped"), suite.get("errors")) == ("1", "1", "1")


def test_rows():
    assert row(result("a", "fail")) == ("a", "FAIL", "0.1235 s", None, "because <&>")
