"""The frame: exit codes, the form of every failure, options before and after the command."""

import json
import os
import resource
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import pytest
import typer

from dz.cli import output
from dz.cli.main import COMMANDS, build
from dz.core.envelope import validate
from dz.errors import EnvironmentFailure, Refused, UsageError

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "numpy", "triton", "fastapi", "huggingface_hub", "httpx", "zmq", "rich"}


def lines(err: str) -> list[str]:
    """The three lines of an error."""
    out = err.splitlines()
    assert (
        len(out) == 3
        and out[0].startswith("error: ")
        and out[1].startswith("  why: ")
        and out[2].startswith("  next: ")
    )
    return [out[0][7:], out[1][7:], out[2][8:]]


def test_every_command_is_there():
    for file in COMMANDS:
        assert find_spec(f"dz.cli.{file}") is not None, f"dz/cli/{file}.py is missing"


def test_each_file_registers_exactly_its_names(dz):
    for file, names in COMMANDS.items():
        app = build([names[0]])
        found = {c.name or c.callback.__name__ for c in app.registered_commands} | {
            g.name for g in app.registered_groups
        }
        assert found == set(names), file


def test_help_is_quick_and_light():
    code = (
        "import sys, time; t = time.perf_counter()\n"
        "from dz.cli.main import main\n"
        "rc = main(['--help']); print(time.perf_counter() - t, file=sys.stderr)\n"
        "print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr); sys.exit(rc)"
    )
    seconds = []  # of processor time: what else the machine does is not counted
    for _ in range(3):
        begun = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime)
    modules = set(done.stderr.splitlines()[-1].split())
    assert not modules & HEAVY
    assert min(seconds) < 0.5, seconds
    for names in COMMANDS.values():
        for name in names:
            assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("names", COMMANDS.values(), ids=lambda n: n[0])
def test_every_command_explains_itself(names, dz):
    for name in names:
        code, long, err = dz(name, "--help")
        assert code == 0 and err == "" and long == dz(name, "-h")[1]
        for option in ("--json", "--quiet", "--verbose", "--color", "--config", "--no-config", "--version", "-V"):
            assert option in long, (name, option)


def test_examples_stand_as_written(dz):
    assert "\n    dz config show --origin\n" in dz("config", "show", "-h")[1]
    assert "\n    dz adapt org/name " in dz("-h")[1]


def test_version(dz):
    import dz as package

    for argv in (["-V"], ["--version"], ["doctor", "-V"], ["ops", "ls", "--version"]):
        assert dz(*argv) == (0, f"dz {package.__version__}\n", "")
    assert dz("-V", "-q")[1] == f"{package.__version__}\n"
    document = json.loads(dz("-V", "--json")[1])
    validate(document)
    assert document["data"] == {"version": package.__version__}


def test_without_a_command_there_is_help_and_a_usage_exit(dz):
    code, out, err = dz()
    assert code == 2 and "Usage: dz" in out and err == ""
    code, out, err = dz("--json")
    assert code == 2 and json.loads(out)["what"] == "no command was given" and err == ""


@pytest.mark.parametrize(
    ("argv", "what", "why", "next"),
    [
        (["doctr"], "no such command 'doctr'", "did you mean 'doctor'?", "dz --help"),
        (["zzzz"], "no such command 'zzzz'", "usage: dz [OPTIONS] COMMAND [ARGS]...", "dz --help"),
        (["ops", "sho"], "no such command 'sho'", "did you mean 'show'?", "dz ops --help"),
        (["doctor", "--jsom"], "no such option: --jsom", "did you mean --json?", "dz doctor --help"),
        (["--verison"], "no such option: --verison", "did you mean --version?", "dz --help"),
        (["doctor", "--config"], None, "the command line cannot be read", "dz doctor --help"),
        (["ops", "show"], "missing argument 'NAME'", "usage: dz ops show", "dz ops show --help"),
        (["doctor", "--color", "pink"], None, "usage: dz doctor", "dz doctor --help"),
        (["doctor", "surplus"], None, "usage: dz doctor", "dz doctor --help"),
        (["ls", "-q", "-v"], "-q and -v together", "one asks for less", "leave one out"),
        (["ls", "--config", "x", "--no-config"], "--config x and --no-config together", "", "leave one out"),
    ],
    ids=lambda v: "_".join(v) if isinstance(v, list) else None,
)
def test_usage_errors(dz, argv, what, why, next):
    code, out, err = dz(*argv)
    said = lines(err)
    assert code == 2 and out == ""
    assert what is None or said[0] == what
    assert said[1].startswith(why) and said[2] == next
    assert what is not None or argv[-1] in said[0]


@pytest.mark.parametrize("argv", [["doctr"], ["doctor", "--jsom"], ["ops", "show"]])
def test_usage_errors_in_json(dz, argv):
    code, out, err = dz(*argv, "--json")
    document = json.loads(out)
    validate(document)
    assert code == 2 == document["exit_code"] and document["code"] == "usage" and err == ""


@pytest.mark.parametrize(("error", "code"), [(Refused, 1), (UsageError, 2), (EnvironmentFailure, 3)])
def test_dz_errors(dz, command, error, code):
    def probe() -> None:
        """Fail."""
        raise error("what", "why", "dz doctor", code="some_code")

    command(probe)
    assert dz("probe") == (code, "", "error: what\n  why: why\n  next: dz doctor\n")
    got, out, err = dz("probe", "--json")
    document = json.loads(out)
    validate(document)
    assert (got, err) == (code, "") and document["code"] == "some_code" and document["exit_code"] == code


def test_foreign_exceptions_are_explained(dz, command):
    def probe() -> None:
        """Fail."""
        raise PermissionError(13, "denied", "/some/file")

    command(probe)
    code, out, err = dz("probe")
    assert code == 3 and out == "" and "/some/file" in lines(err)[0]


def test_a_missing_package_is_the_environment_but_a_missing_module_of_dz_is_a_defect(dz, command):
    def probe(name: str) -> None:
        """Fail."""
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    command(probe)
    assert dz("probe", "torchvision")[0] == 3
    code, _, err = dz("probe", "dz.nowhere")
    assert code == 2 and "defect" in err


def test_a_defect_leaves_a_traceback_file(dz, command, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def probe(secret: str) -> None:
        """Fail."""
        raise ZeroDivisionError("by nothing")

    command(probe)
    code, out, err = dz("probe", "hf_secret")
    what, why, _ = lines(err)
    (file,) = tmp_path.glob("dz-traceback-*.txt")
    assert code == 2 and out == "" and what == "internal error: ZeroDivisionError: by nothing" and str(file) in why
    text = file.read_text()
    assert "Traceback" in text and "by nothing" in text and "hf_secret" not in text
    assert "Traceback" not in err
    assert "Traceback" in dz("probe", "x", "-vv")[2]
    monkeypatch.setenv("DZ_DEBUG", "1")
    assert "Traceback" in dz("probe", "x")[2]
    code, out, err = dz("probe", "x", "--json")
    document = json.loads(out)
    validate(document)
    assert code == 2 and document["code"] == "internal"


def test_exit_codes_of_commands(dz, command):
    def probe(way: str) -> int | None:
        """End in some way."""
        if way == "exit":
            raise typer.Exit(1)
        if way == "ctrl-c":
            raise KeyboardInterrupt
        return {"none": None, "one": 1, "three": 3}[way]

    command(probe)
    assert [dz("probe", way)[0] for way in ("none", "one", "three", "exit", "ctrl-c")] == [0, 1, 3, 1, 130]
    code, out, _ = dz("probe", "ctrl-c", "--json")
    document = json.loads(out)
    validate(document)
    assert code == 130 == document["exit_code"]


def test_an_error_after_the_document_leaves_stdout_one_document(dz, command):
    def probe() -> None:
        """Answer, then fail."""
        output.get().document({"schema": "dz.version/1"})
        raise Refused("late", "why", "next")

    command(probe)
    code, out, err = dz("probe", "--json")
    assert code == 1 and json.loads(out) == {"schema": "dz.version/1"} and lines(err)[0] == "late"


def test_common_options_on_either_side(dz, command):
    seen = []

    def probe(n: Annotated[int, typer.Option("-n")] = 3) -> None:
        """Look."""
        out = output.get()
        seen.append((n, out.json, out.quiet, out.verbose, out.color))

    command(probe)
    dz("--json", "probe")
    dz("probe", "--json", "-n", "5")
    dz("-q", "--color", "never", "probe", "--color=always")
    dz("-v", "probe")
    dz("probe", "-vv")
    dz("probe")
    assert seen == [
        (3, True, False, 0, "auto"),
        (5, True, False, 0, "auto"),
        (3, False, True, 0, "always"),
        (3, False, False, 1, "auto"),
        (3, False, False, 2, "auto"),
        (3, False, False, 0, "auto"),
    ]


def test_ctrl_c_ends_a_real_process_with_130(tmp_path):
    code = (
        "import signal, sys, types, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs inherit it ignored
        "from dz.cli import main as m\n"
        "def probe() -> None:\n"
        "    'Wait.'\n"
        "    print('ready', flush=True); time.sleep(30)\n"
        "f = types.ModuleType('dz.cli.probe'); f.__spec__ = types.SimpleNamespace()\n"
        "f.register = lambda app: app.command('probe')(probe)\n"
        "sys.modules['dz.cli.probe'] = f; m.COMMANDS['probe'] = ('probe',); sys.argv = ['dz', 'probe']; m.run()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130 and err.strip().splitlines()[0] == "error: interrupted"


def test_a_reader_that_leaves_changes_nothing(tmp_path):
    """The pipe is closed before anything is written: no traceback, and the exit code is the command's own."""
    for argv, code in ((["config", "show"], 0), (["show", "./none"], 2), (["--help"], 0)):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "dz", *argv]
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "DZ_WORKSPACE": str(tmp_path)},
        )
        os.close(write)
        assert done.returncode == code, done.stderr
        assert "Broken" not in done.stderr and "Traceback" not in done.stderr
