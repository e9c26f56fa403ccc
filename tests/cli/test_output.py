"""The one sink: what goes where in which mode."""

import io
import json

import pytest

from dz.cli.output import Out
from dz.cli.progress import Live, Plain
from dz.core.protocols import Silent
from dz.errors import Refused


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def say(**mode) -> tuple[str, str]:
    """Everything a command may say, in one mode: (stdout, stderr)."""
    out = Out(stdout=io.StringIO(), stderr=io.StringIO(), **mode)
    out.note("a note")
    out.document({"schema": "dz.x/1"})
    out.table(("A", "B"), [(1, "x")])
    out.line("a line")
    out.result("/path", "written to /path")
    out.warn("careful")
    out.hint("dz next")
    return out.stdout.getvalue(), out.stderr.getvalue()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "NO_PROGRESS"):
        monkeypatch.delenv(name, raising=False)


def test_for_people():
    out, err = say()
    assert out == "A  B\n1  x\na line\nwritten to /path\n"
    assert err == "a note\nwarning: careful\nhint: dz next\n"


def test_quiet_is_the_bare_value():
    assert say(quiet=True) == ("/path\n", "warning: careful\n")


def test_json_is_the_document():
    out, err = say(json=True)
    assert json.loads(out) == {"schema": "dz.x/1"}
    assert err == "a note\nwarning: careful\n"


def test_json_and_quiet():
    out, err = say(json=True, quiet=True)
    assert json.loads(out) == {"schema": "dz.x/1"} and err == "warning: careful\n"


def test_a_second_document_is_a_defect():
    out = Out(json=True, stdout=io.StringIO())
    out.document({})
    with pytest.raises(RuntimeError, match="exactly one"):
        out.document({})


def test_result_without_text():
    out = Out(stdout=io.StringIO())
    out.result(3)
    assert out.stdout.getvalue() == "3\n"


@pytest.mark.parametrize(
    ("color", "env", "tty", "colored"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colour_rules(monkeypatch, color, env, tty, colored):
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    make = Terminal if tty else io.StringIO
    out = Out(color=color, stdout=make(), stderr=make())
    out.table(("A",), [("PASS",)])
    out.warn("w")
    out.error(Refused("what", "why", "next"))
    assert ("\x1b[" in out.stdout.getvalue()) == colored
    assert out.stderr.getvalue().count("\x1b[") == (4 if colored else 0)
    assert "PASS" in out.stdout.getvalue()


def test_progress_by_mode(monkeypatch):
    def kind(stream, **mode):
        return type(Out(stderr=stream, **mode).progress())

    assert kind(Terminal()) is Live
    assert kind(io.StringIO()) is Plain
    assert kind(Terminal(), json=True) is Plain
    assert kind(Terminal(), quiet=True) is Silent
    for name in ("CI", "NO_PROGRESS"):
        monkeypatch.setenv(name, "1")
        assert kind(Terminal()) is Plain
        monkeypatch.delenv(name)


def test_progress_writes_to_stderr_only():
    out = Out(stdout=io.StringIO(), stderr=io.StringIO())
    p = out.progress()
    p.start("load", 10, "B")
    p.advance(10)
    p.finish("2 files")
    assert out.stdout.getvalue() == ""
    first, last = out.stderr.getvalue().splitlines()
    assert first == "load (10 B)" and last.startswith("load: done in ") and last.endswith(" (2 files)")


def test_what_is_attached_stands_beside_the_answer_and_beside_an_error():
    import io
    import json

    from dz.cli.output import Out
    from dz.errors import Refused

    for say in (lambda o: o.document({"schema": "dz.x/1", "data": 1}), lambda o: o.error(Refused("a", "b", "c"))):
        out = Out(json=True, stdout=io.StringIO())
        out.attach("audit", {"files": []})
        say(out)
        assert json.loads(out.stdout.getvalue())["audit"] == {"files": []}
