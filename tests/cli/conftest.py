"""Fixtures: a command line run in this process, away from the user's settings, workspace and network."""

import pytest

from dz.cli import common, output
from dz.cli.main import main


@pytest.fixture
def dz(tmp_path, monkeypatch, capsys):
    """Run a command line: (exit code, stdout, stderr)."""
    for name in ("NO_COLOR", "FORCE_COLOR", "DZ_DEBUG", "HF_ENDPOINT", "CI", "NO_PROGRESS", "DZ_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DZ_WORKSPACE", str(tmp_path / "reports"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def run(*argv: str):
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    yield run
    output.use(output.Out())
    common.begin(())


@pytest.fixture
def command(monkeypatch):
    """Make `dz probe` run a function given as `command(function)`."""
    import sys
    import types

    from dz.cli import main as module

    def install(function):
        file = types.ModuleType("dz.cli.probe")
        file.register = lambda app: app.command("probe")(function)
        file.__spec__ = types.SimpleNamespace(name="dz.cli.probe")
        monkeypatch.setitem(sys.modules, "dz.cli.probe", file)
        monkeypatch.setitem(module.COMMANDS, "probe", ("probe",))

    return install
