"""The outcome of the demo, and running one dz command as a user would type it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import dz

TAIL = 12  # lines of a failed command's output that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: `command` as typed (empty where dz itself acted), `figures` by name, `text` the same in words. `reason`
    says why a step failed or was not run."""

    name: str
    status: Literal["ok", "fail", "not run"]
    command: str = ""
    seconds: float = 0.0
    exit_code: int = 0
    text: str = ""
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """Where commands run: in `folder`, with `env`, each writing everything it says into `folder`/logs."""

    folder: Path
    env: Mapping[str, str]

    @classmethod
    def at(cls, folder: Path) -> Shell:
        """A shell in `folder` whose workspace, and whose copies of remote code, lie there too. The rest of the
        environment is the user's."""
        env = dict(os.environ)
        env.setdefault("OMP_NUM_THREADS", "1")  # on a model this small a second thread only waits for the first
        package = str(Path(dz.__file__).resolve().parent.parent)
        env["PYTHONPATH"] = os.pathsep.join(p for p in (package, env.get("PYTHONPATH")) if p)
        env["DZ_WORKSPACE"] = str(folder / "reports")
        env.setdefault("HF_MODULES_CACHE", str(folder / "modules"))
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        return cls(folder=folder, env=env)

    def start(self, name: str, args: list[str]) -> subprocess.Popen[bytes]:
        """Start `python -m dz ARGS` in a process group of its own; a --json document goes to `answer`."""
        apart = "--json" in args
        with self.log(name).open("wb") as log, (self.answer(name) if apart else Path(os.devnull)).open("wb") as answer:
            return subprocess.Popen(
                [sys.executable, "-m", "dz", *args],
                cwd=self.folder,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=answer if apart else log,
                stderr=log if apart else subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, name: str, args: list[str], timeout: float) -> tuple[int, float, str]:
        """Run to the end: (exit code, seconds, why it failed or ""). A command that outlives `timeout` is killed."""
        begun = time.monotonic()
        process = self.start(name, args)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            end(process)
            return 1, time.monotonic() - begun, f"no end after {timeout:.0f} s; see {self.log(name)}"
        except BaseException:
            end(process)
            raise
        return code, time.monotonic() - begun, "" if code == 0 else self.tail(name)

    def log(self, name: str) -> Path:
        """Where a command's output goes."""
        return self.folder / "logs" / f"{name}.log"

    def answer(self, name: str) -> Path:
        """Where the document of a command with --json goes."""
        return self.folder / "logs" / f"{name}.json"

    def tail(self, name: str) -> str:
        """The last lines of a command's output."""
        lines = self.log(name).read_text("utf-8", "replace").rstrip().splitlines()
        return "\n".join(lines[-TAIL:])


def typed(args: list[str]) -> str:
    """The command line that a user would type for these arguments."""
    return shlex.join(["dz", *args])


def end(process: subprocess.Popen[bytes], grace: float = 10.0) -> None:
    """End a process started by `Shell.start` and all that it started: asked first, then killed."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            continue
        if sign == signal.SIGTERM and _group_lives(process.pid):
            continue
        break
    process.wait()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
