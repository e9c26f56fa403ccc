"""reports/survey.py: a row for a type, one for what cannot be built, and the committed report."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import dz

REPORTS = Path(dz.__file__).resolve().parents[1] / "reports"


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("dz_reports_survey", REPORTS / "survey.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(report):
    """The rows of a type that builds and of one that there is not."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "print", lambda text, **_: printed.append(text), raising=False)
        report.work(["gpt2", "no_such_type"])
    return [json.loads(p) for p in printed]


def test_a_type_has_a_row(rows):
    row = rows[0]
    assert (row["type"], row["built"], row["cls"]) == ("gpt2", True, "GPT2LMHeadModel")
    assert 0.9 < row["known_share"] <= 1
    assert row["sites"]["known"] > 5
    assert {"embedding", "layer_norm"} <= set(row["digests"])
    assert row["seconds"] < 60


def test_what_cannot_be_built_says_why(rows):
    assert (rows[1]["built"], "no_such_type" in rows[1]["why"]) == (False, True)


def test_the_table_counts_and_sums(report, rows):
    summary = report.summary(rows)
    assert (summary["types"], summary["built"]) == (2, 1)
    text = report.table({"types": rows, "summary": summary, "transformers": "x"})
    assert "| gpt2 | GPT2LMHeadModel |" in text
    assert "| no_such_type | not built |" in text
    json.dumps(summary)


def test_a_process_that_ends_or_works_too_long_is_a_row(report, monkeypatch, tmp_path):
    script = tmp_path / "worker.py"
    lines = ["import sys, json", "for k in sys.argv[2:]:", "    if k == 'dies': sys.exit(3)"]
    lines += ["    while k == 'hangs': pass", "    print(json.dumps({'type': k, 'seconds': 0}), flush=True)"]
    script.write_text("\n".join(lines))
    monkeypatch.setattr(report, "__file__", str(script))
    monkeypatch.setattr(report, "START", 0.0)
    found = report.collect(["a", "dies", "b", "hangs", "c", "d"], 3.0)
    assert [r["type"] for r in found] == ["a", "dies", "b", "hangs", "c", "d"]
    assert [r.get("why", "") for r in found] == ["", "its process ended (3)", "", "longer than 3 s", "", ""]


def test_the_committed_report_is_whole():
    document = json.loads((REPORTS / "survey.json").read_text("utf-8"))
    assert document["summary"]["types"] == len(document["types"]) > 100
    for row in document["types"]:
        assert row["built"] or row["why"], row["type"]
        assert row["kind"] in ("causal", "image-text")
        assert not row["built"] or set(row["sites"]) == {"known", "variant", "unknown"}
    assert (REPORTS / "survey.md").read_text("utf-8").count("\n| ") > len(document["types"])
