"""`dz accept` as it is typed: a real folder, the fake server as a process, upstream's side from the oracle."""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dz import adapt
from dz.accept import accept
from dz.cli import common, output
from dz.cli.main import main
from dz.core.envelope import validate
from dz.core.plan import Plan

CHECKS = """
checks:
  - check: integrity
  - check: load
  - check: text
    params: {prompts: 3, tokens: 8}
  - check: recovery
    required: false
"""


@pytest.fixture
def dz(tmp_path, monkeypatch, capsys, oracle):
    """Run a command line: (exit code, stdout, stderr). `dz.faults` are the next server's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DZ_WORKSPACE", str(tmp_path / "reports"))
    monkeypatch.delenv("DZ_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/config.json").write_text('{"model_type": "toy", "dtype": "float32"}')
    save_file({"a": torch.ones(3)}, tmp_path / "toy/model.safetensors")
    (tmp_path / "list.yaml").write_text(CHECKS)
    fake, started = Path(__file__).with_name("fake_server.py"), []

    class Counted(accept.Own):
        def _start(self):
            started.append(self._command)
            return super()._start()

    def command(model, arguments):
        run.arguments = [model, *arguments]
        return [sys.executable, str(fake), "--faults", json.dumps(run.faults)]

    def plan(source, **given):
        run.dtypes.append(given["settings"].get("dtype"))
        made = Plan(model=source.name, rev8=source.rev8, device="cpu", dtype="float32", sites=(), hash=run.plan)
        folder = Path(given["settings"].get("workspace")) / source.workspace_name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "inventory.json").write_text(
            json.dumps({"data": {"coverage": {"matched": run.matched, "missing": ["b"][: 7 - run.matched]}}})
        )
        return made

    def run(*argv):
        code = main(["accept", "./toy", "--checklist", "list.yaml", *argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    monkeypatch.setattr(accept, "serve_command", command)
    monkeypatch.setattr(accept, "Own", Counted)
    monkeypatch.setattr(accept, "Golden", lambda *a, **k: oracle())
    monkeypatch.setattr(adapt, "current_plan", plan, raising=False)
    run.dtypes = []
    run.faults, run.plan, run.matched, run.started, run.folder = {}, "0" * 16, 7, started, tmp_path
    yield run
    output.use(output.Out())
    common.begin(())


def report_of(dz):
    (path,) = dz.folder.glob("reports/toy@*/list/report.json")
    return json.loads(path.read_text())


def test_all_passed(dz):
    code, out, err = dz("--junit-xml", "x/results.xml", "--report", "copy.json")
    assert code == 0, out + err
    lines = out.splitlines()
    assert lines[0].split() == ["CHECK", "STATUS", "VALUE", "THRESHOLD", "REASON"]
    assert [line.split()[:2] for line in lines[1:5]] == [[n, "PASS"] for n in ("integrity", "load", "text", "recovery")]
    assert lines[5].startswith("passed: 4 pass -> ") and "hint: dz serve ./toy" in err
    document = report_of(dz)
    validate(document)
    assert document == json.loads((dz.folder / "copy.json").read_text()) and document["status"] == "pass"
    assert document["inputs"]["plan"] == "0" * 16 and document["inputs"]["versions"]["torch"]
    assert ET.parse(dz.folder / "x/results.xml").getroot().get("tests") == "4"
    load = document["data"]["results"][1]
    assert load["details"]["memory"][0]["name"] == "weights" and load["details"]["memory"][0]["mib"] == 0.6
    assert load["details"]["coverage"]["matched"] == 7
    folder = next(dz.folder.glob("reports/toy@*"))
    assert all((folder / e).is_file() for r in document["data"]["results"] for e in r["evidence"])


def test_a_second_run_starts_nothing(dz):
    dz()
    assert len(dz.started) == 1
    code, _, err = dz()
    assert code == 0 and len(dz.started) == 1 and err.count("kept from before") == 4


def test_the_server_gets_what_we_were_given(dz):
    dz(
        "--trust-remote-code",
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
        "--plugin",
        "mod:fn",
        "--no-config",
        "-k",
        "load",
    )
    words = " ".join(dz.arguments)
    assert dz.arguments[0] == "./toy" and "--trust-remote-code" in words and "--no-config" in words
    for pair in ("--dtype bfloat16", "--device cpu", "--plugin mod:fn", f"--workspace {dz.folder}/reports"):
        assert pair in words


@pytest.mark.parametrize(
    ("argv", "variable", "want", "root"),
    [
        ((), "", "float32", "reports/toy@*/verify-float32"),
        (("--dtype", "auto"), "", "auto", "reports"),
        (("--dtype", "float16"), "float32", "float16", "reports/toy@*/verify-float16"),
        (("--dtype", "bfloat16"), "", "auto", "reports"),  # the checkpoint's own
        ((), "float16", "float16", "reports"),
    ],
)
def test_verification_is_in_float32_unless_told_otherwise(dz, monkeypatch, argv, variable, want, root):
    (dz.folder / "toy/config.json").write_text('{"model_type": "toy", "dtype": "bfloat16"}')
    monkeypatch.setenv("DZ_DTYPE", variable)
    code, out, _ = dz("-k", "load", *argv)
    (workspace,) = dz.folder.glob(root)
    assert code == 0, out
    assert dz.dtypes == [want] and f"--workspace {workspace} --device auto --dtype {want}" in " ".join(dz.arguments)
    assert report_of(dz)["status"] == "incomplete"  # the report lies where it always does


def test_a_settings_file_may_name_the_dtype(dz):
    (dz.folder / "dz.toml").write_text('dtype = "auto"')
    dz("-k", "load")
    assert dz.dtypes == ["auto"]


def test_a_given_server_keeps_its_own_dtype(dz):
    import fake_server

    (dz.folder / "toy/config.json").write_text('{"model_type": "toy", "dtype": "bfloat16"}')
    fake = fake_server.Fake({}).start()
    dz("--url", fake.url, "-k", "load")
    fake.shutdown()
    fake.server_close()
    assert report_of(dz)["inputs"]["dtype"] == "bfloat16"


def test_another_plan_runs_again(dz):
    dz("-k", "text")
    dz.plan = "1" * 16
    dz("-k", "text")
    assert len(dz.started) == 2


def test_a_failure_is_exit_1_and_lf_runs_it_alone(dz):
    dz.faults = {"wrong_token": 3}
    code, out, err = dz()
    assert code == 1 and "text       FAIL" in out and "--lf" in err and report_of(dz)["status"] == "fail"
    assert dz("--exit-zero")[0] == 0
    dz.faults = {}
    code, out, _ = dz("--lf")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:-1]] == ["text"]
    assert report_of(dz)["status"] == "pass"


def test_a_server_that_does_not_start(dz):
    dz.faults = {"no_start": 1}
    code, out, _ = dz()
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 1 and "FAIL" in rows["load"] and "1 tensor is missing: a.weight" in rows["load"]
    assert "SKIP" in rows["text"] and "there is no server" in rows["text"]


def test_incomplete_weights_fail_load(dz):
    dz.matched = 6
    code, out, _ = dz("-k", "load")
    assert code == 1 and "1 missing: b" in out


def test_json_is_one_document_and_x_ends_early(dz):
    dz.faults = {"no_start": 1}
    code, out, _ = dz("--json", "-x")
    document = json.loads(out)
    validate(document)
    assert code == 1 and [r["id"] for r in document["data"]["results"]] == ["integrity", "load"]
    assert document["data"]["missing"] == ["text", "recovery"]


def test_quiet_is_one_word(dz):
    assert dz("-q", "-k", "integrity")[:2] == (0, "passed\n")


def test_list_runs_nothing(dz):
    code, out, _ = dz("--list", "-k", "not text", "--json")
    document = json.loads(out)
    validate(document)
    rows = {r["id"]: r for r in document["data"]["checks"]}
    assert code == 0 and not dz.started and rows["text"]["chosen"] is False and rows["load"]["chosen"] is True
    assert rows["text"]["params"]["prompts"] == 3 and rows["text"]["last"] == ""
    assert "recovery   no" in dz("--list")[1]


def test_broken_files_fail_integrity(dz):
    dz("-k", "integrity")
    raw = (dz.folder / "toy/model.safetensors").read_bytes()
    (dz.folder / "toy/model.safetensors").write_bytes(raw[:-1])
    code, _, err = dz("-k", "integrity")
    assert code == 1 and "model.safetensors" in err


def test_a_given_server(dz):
    import fake_server

    fake = fake_server.Fake({}).start()
    code, out, _ = dz("--url", fake.url + "/v1")
    assert code == 0 and not dz.started and "SKIP" in out and "given by --url" in out
    fake.shutdown()
    fake.server_close()
    code, out, _ = dz("--url", fake.url, "--no-resume", "-k", "load")
    assert code == 1 and "nobody answers" in out


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("-k", "and"), 2, "cannot be read"),
        (("--checklist", "defualt"), 2, "did you mean 'default'"),
        (("-x", "--maxfail", "3"), 2, "-x is --maxfail 1"),
        (("--maxfail", "-1"), 2, "maxfail"),
    ],
)
def test_usage(dz, argv, code, words):
    found, _, err = dz(*argv)
    assert found == code and words in err and not dz.started


def test_an_unknown_model(dz, capsys):
    assert main(["accept", "./nothing"]) == 2
    assert "./nothing" in capsys.readouterr().err
