"""One engine worker process and the two sockets to it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

import dz
from dz.core.messages import FromEngine, ToEngine

COMMAND = (sys.executable, "-m", "dz.engine.worker")
_PDEATHSIG = 1  # prctl's PR_SET_PDEATHSIG
_LONGEST_ADDRESS = 100  # bytes; the kernel's limit for a socket's path is 107

Spec = Callable[[str, str], bytes]  # inbox, outbox -> the JSON document for the worker's standard input


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start a worker: its command, its document, and what its environment has beside ours."""

    spec: Spec
    command: Sequence[str] = COMMAND
    env: Mapping[str, str] | None = None


class Worker:
    """A started worker. `last_message` is the monotonic time of its latest sign of life."""

    def __init__(
        self, process: asyncio.subprocess.Process, folder: Path, push: zmq.Socket, pull: zmq.asyncio.Socket
    ) -> None:
        self.process, self._folder, self._push, self._pull = process, folder, push, pull
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.last_message = time.monotonic()

    @classmethod
    async def start(cls, launch: Launch) -> Worker:
        """Bind the sockets, start the process and hand it its document. Raises OSError when it cannot be started."""
        folder = _private_folder()
        push = zmq.Context.instance().socket(zmq.PUSH)
        pull = zmq.asyncio.Context.instance().socket(zmq.PULL)
        try:
            for socket in (push, pull):
                socket.setsockopt(zmq.LINGER, 0)
                socket.set_hwm(0)
            inbox, outbox = f"ipc://{folder}/in", f"ipc://{folder}/out"
            push.bind(inbox)
            pull.bind(outbox)
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=2,  # the server's stdout carries the answer alone
                env=_environment(launch.env),
                start_new_session=True,  # Ctrl-C goes to the server, which drains first
                preexec_fn=_die_with(os.getpid()),
            )
        except BaseException:
            _close(folder, push, pull)
            raise
        worker = cls(process, folder, push, pull)
        await worker._hand_over(launch.spec(inbox, outbox))
        return worker

    async def _hand_over(self, document: bytes) -> None:
        stdin = self.process.stdin
        if stdin is None:
            raise RuntimeError("the worker was started without standard input")
        try:
            stdin.write(document + b"\n")
            await stdin.drain()
            stdin.close()
        except (BrokenPipeError, ConnectionResetError):
            return  # it died at once; whoever waits for it learns why

    async def send(self, message: ToEngine, *, timeout: float = 5.0) -> bool:
        """Send a message; False if nobody takes it within `timeout` seconds (the worker is gone)."""
        data, deadline = msgspec.msgpack.encode(message), time.monotonic() + timeout
        while self.process.returncode is None:
            try:
                self._push.send(data, zmq.NOBLOCK)
                return True
            except zmq.Again:  # no connection yet, or none any more
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(0.005)
        return False

    async def receive(self) -> FromEngine:
        """The next message."""
        data = await self._pull.recv()
        self.last_message = time.monotonic()
        return self._decoder.decode(data)

    async def leftovers(self) -> list[FromEngine]:
        """The messages that a dead worker left in the socket."""
        out = []
        while await self._pull.poll(100):
            out.append(await self.receive())
        return out

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process (SIGSTOP), where the system tells."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text("ascii", "replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[:1] == ["T"]

    def kill(self) -> None:
        """SIGKILL for the worker and everything it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    async def close(self, *, grace: float = 0.0) -> None:
        """Wait up to `grace` seconds for the process to end, kill what is left of it, and remove the sockets."""
        if grace > 0:
            try:
                await asyncio.wait_for(self.process.wait(), grace)
            except TimeoutError:
                self.kill()
        self.kill()
        await self.process.wait()
        _close(self._folder, self._push, self._pull)


def _close(folder: Path, *sockets: zmq.Socket) -> None:
    for socket in sockets:
        socket.close(linger=0)
    shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> Path:
    """A folder that only this user can enter, with a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="dz-"))
    if len(os.fsencode(folder)) + len("/out") > _LONGEST_ADDRESS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="dz-", dir="/tmp"))
    return folder


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    """Ours, with the folder of this very dz first on the path."""
    root = str(Path(dz.__file__).resolve().parent.parent)
    path = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **(extra or {})}


def _die_with(parent: int) -> Callable[[], None] | None:
    """What the child does before it becomes the worker: ask to be killed when the server dies, however it dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
