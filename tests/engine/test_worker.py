"""The engine process: what it says, how it ends, and that it never outlives its server."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

import dz
from dz.core import jsonio
from dz.core.messages import Abort, Fatal, FromEngine, Output, Ready, Stats, Stop, Submit
from dz.engine.config import EngineSpec
from dz.upstream.media import pack

HERE = Path(__file__).parent
PATHS = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE), str(Path(dz.__file__).parent.parent)])
WAIT = 30_000  # milliseconds; only a failure takes as long


class Server:
    """The server's end of the two sockets, and a spec that names them."""

    def __init__(self, tiny, folder, **more):
        self.folder = Path(tempfile.mkdtemp(prefix="dz-"))
        self.context = zmq.Context()
        self.push, self.pull = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        for socket in (self.push, self.pull):
            socket.linger = 0
        self.push.bind(f"ipc://{self.folder}/in")
        self.pull.bind(f"ipc://{self.folder}/out")
        settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "block_size": 4, **more.pop("settings", {})}
        self.spec = EngineSpec(
            source=jsonio.to_builtins(tiny.source(folder)),
            settings=settings,
            inbox=f"ipc://{self.folder}/in",
            outbox=f"ipc://{self.folder}/out",
            **more,
        )
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self.stats = []

    @property
    def document(self):
        return msgspec.json.encode(self.spec).decode()

    def send(self, *messages):
        for m in messages:
            self.push.send(msgspec.msgpack.encode(m))

    def receive(self, *, also_stats=False):
        """The next message that is not Stats; Stats are kept in `stats`."""
        while True:
            assert self.pull.poll(WAIT), "the worker says nothing"
            m = self._decode(self.pull.recv())
            if not isinstance(m, Stats):
                return m
            self.stats.append(m)
            if also_stats:
                return m

    def answer(self, *ids):
        """({id: tokens}, {id: last Output}) of these requests, until each has ended."""
        tokens, last = {i: [] for i in ids}, {}
        while len(last) < len(ids):
            o = self.receive()
            assert isinstance(o, Output), o
            tokens[o.id] += o.tokens
            if o.finish:
                last[o.id] = o
        return tokens, last

    def close(self):
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def server(tiny, models):
    """server(name, ...): a Server for a tiny model."""
    with contextlib.ExitStack() as stack:

        def make(name="llama", folder=None, **more):
            made = Server(tiny, folder or models(name).folder, **more)
            stack.callback(made.close)
            return made

        yield make


class Nursery:
    """nursery.py at work."""

    def __init__(self, notes):
        env = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "DZ_TEST_NOTES": str(notes)}
        env["TRANSFORMERS_VERBOSITY"] = "error"
        self.notes = notes
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            text=True,
        )
        assert self._line() == {"ready": True}
        self.codes, self.live = {}, set()

    def _line(self):
        return json.loads(self.process.stdout.readline())

    def start(self, server, *, between=False):
        """(pid of a worker for this server, pid of its parent)."""
        self.process.stdin.write(json.dumps({"spec": server.document, "between": between}) + "\n")
        self.process.stdin.flush()
        while "parent" not in (said := self._line()):
            self.codes[said["pid"]] = said["code"]
        self.live.add(said["pid"])
        return said["pid"], said["parent"]

    def code(self, pid):
        """The exit code of a worker, once it has ended."""
        while pid not in self.codes:
            said = self._line()
            self.codes[said["pid"]] = said["code"]
        return self.codes[pid]

    def close(self):
        for pid in self.live - self.codes.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait(10)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    made = Nursery(tmp_path_factory.mktemp("notes") / "notes")
    yield made
    made.close()


def ended(pid, seconds):
    """Whether a process (not a child of this one) has gone within so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_the_command(server, models, helpers, tmp_path):
    """`python -m dz.engine.worker` from the document on its standard input to its exit at Stop."""
    model, notes = models("llama"), tmp_path / "notes"
    made = server(plugins=["plugins_for_tests:note", "plugins_for_tests:note"])
    env = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "DZ_TEST_NOTES": str(notes)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "dz.engine.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        text=True,
    )
    try:
        process.stdin.write(made.document + "\n")
        process.stdin.flush()
        early = [Submit(str(i), c.tokens, helpers.greedy(12, ignore_eos=True)) for i, c in enumerate(model.cases)]
        made.send(*early)  # before it is ready: they wait
        ready = made.receive()
        assert isinstance(ready, Ready)
        tokens, last = made.answer("0", "1", "2", "3")
        assert [tokens[str(i)] for i in range(4)] == model.want
        assert {o.finish for o in last.values()} == {"length"}
        at = model.want[1].index(2)
        made.send(Submit("end", model.cases[1].tokens, helpers.greedy(12)))
        tokens, last = made.answer("end")
        assert tokens["end"] == model.want[1][:at]
        assert (last["end"].finish, last["end"].stop_token) == ("stop", 2)
        made.send(Stop())
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert out == "", "standard output is the server's"
    assert "memory: weights" in err
    assert "in tier gather" in err
    assert notes.read_text() == f"engine {process.pid}\n"
    assert (ready.vocab_size, ready.max_model_len, ready.dtype, ready.device) == (97, 256, "float32", "cpu")
    assert (ready.max_num_seqs, ready.slots, ready.block_size) == (4, 4, 4)
    assert ready.blocks * 4 == 256 * 4
    assert ready.eos_token_ids == [2]
    assert ready.mixers == [("mixers", 3, "gather")]
    assert [s for s, _ in ready.stages] == ["build", "weights", "tiers", "swaps"]
    assert next(name for name, _, _ in ready.memory) == "weights"


def test_what_it_says(server, nursery, models, helpers):
    """Outputs token by token, refusals, aborts, images by value, and figures while idle too."""
    model = models("qwen3_vl")
    made = server("qwen3_vl", settings={"max_num_batched_tokens": 16})
    pid, _ = nursery.start(made)
    assert isinstance(made.receive(), Ready)
    for k in (1, 4, 5):
        case = model.cases[k]
        made.send(Submit(str(k), case.tokens, helpers.greedy(12, logprobs=1, ignore_eos=True), pack(case.media)))
    made.send(Submit("long", [5] * 300, helpers.greedy(4, ignore_eos=True)))
    blob = msgspec.structs.replace(pack(model.cases[4].media)["pixel_values"], shape=(1, 2))
    made.send(Submit("blob", [5], helpers.greedy(4, ignore_eos=True), {"pixel_values": blob}))
    made.send(Submit("gone", [5, 6], helpers.greedy(200, ignore_eos=True)), Abort(["gone", "never"]))
    tokens, last = made.answer("1", "4", "5", "long", "blob", "gone")
    assert {k: tokens[str(k)] for k in (1, 4, 5)} == {k: model.want[k] for k in (1, 4, 5)}
    assert last["long"].error[0] == "too_long"
    assert last["blob"].error[0] == "bad_blob"
    assert last["gone"].finish == "abort"
    assert last["4"].logprobs[0].token == model.want[4][-1]
    while (stats := made.receive(also_stats=True)).running:
        pass
    assert (stats.waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0)
    assert set(stats.steps) == {"prefill", "mixed", "decode"}
    since = time.monotonic()
    for _ in range(2):
        assert isinstance(made.receive(also_stats=True), Stats)
    assert time.monotonic() - since < 3, "no sign of life while idle"
    made.send(Stop())
    assert nursery.code(pid) == 0


def broken(tiny, models, tmp_path):
    folder = shutil.copytree(models("llama").folder, tmp_path / "broken")
    tiny.rewrite(folder, {"model.norm.weight": None})
    return folder


@pytest.mark.parametrize(
    "change, exit_code, code, word",
    [
        ({"broken": True}, 1, "coverage", "1 missing: model.norm.weight"),
        ({"settings": {"dtype": "int8"}}, 2, "bad_dtype", "bfloat16"),
        ({"settings": {"max_model_len": 4096}}, 1, "too_long", "256 tokens"),
        ({"settings": {"cpu_memory_utilization": 1e-9}}, 1, "no_memory", "B are missing"),
        ({"plugins": ["no_such_module:f"]}, 2, "no_plugin", "no_such_module"),
        ({"plugins": ["plugins_for_tests:break_loading"]}, 2, "internal", "ArithmeticError: the loader is broken"),
    ],
)
def test_why_it_ends_before_it_is_ready(server, nursery, models, tiny, tmp_path, change, exit_code, code, word):
    folder = broken(tiny, models, tmp_path) if change.get("broken") else None
    made = server(folder=folder, **{k: v for k, v in change.items() if k != "broken"})
    pid, _ = nursery.start(made)
    fatal = made.receive()
    assert isinstance(fatal, Fatal)
    assert (fatal.code, fatal.exit_code) == (code, exit_code)
    assert word in fatal.why
    assert fatal.next
    assert nursery.code(pid) == exit_code


@pytest.mark.skipif(torch.accelerator.is_available(), reason="it would find the device")
def test_a_device_that_is_not_here(server, nursery):
    made = server(settings={"device": "cuda"})
    pid, _ = nursery.start(made)
    assert made.receive().exit_code == 3
    assert nursery.code(pid) == 3


@pytest.mark.parametrize(
    "plugin, exit_code, code", [("break_steps", 2, "internal"), ("out_of_memory", 3, "out_of_memory")]
)
def test_why_it_ends_while_it_serves(server, nursery, helpers, plugin, exit_code, code):
    made = server(plugins=[f"plugins_for_tests:{plugin}"])
    pid, _ = nursery.start(made)
    assert isinstance(made.receive(), Ready)
    made.send(Submit("a", [5, 6], helpers.greedy(20, ignore_eos=True)))
    while isinstance(said := made.receive(), Output):
        assert said.finish is None
    assert isinstance(said, Fatal)
    assert (said.code, said.exit_code) == (code, exit_code)
    assert nursery.code(pid) == exit_code


def test_a_plugin_can_poison_one_request(server, nursery, models, helpers):
    """The test seam reaches the engine: what is not finite fails the request it belongs to."""
    model = models("llama")
    made = server(plugins=["plugins_for_tests:poison"])
    pid, _ = nursery.start(made)
    made.receive()
    for i, c in enumerate(model.cases[:3]):
        made.send(Submit(str(i), c.tokens, helpers.greedy(12, ignore_eos=True)))
    made.send(Submit("x", [5, 95, 6], helpers.greedy(12, ignore_eos=True)))
    tokens, last = made.answer("0", "1", "2", "x")
    assert [tokens[str(i)] for i in range(3)] == model.want[:3]
    assert (last["x"].finish, last["x"].error[0]) == ("error", "non_finite")
    made.send(Stop())
    assert nursery.code(pid) == 0


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_server(server, nursery, helpers, busy):
    """The parent is killed, without a word: idle or at work, the worker goes within seconds."""
    made = server()
    pid, parent = nursery.start(made, between=True)
    assert isinstance(made.receive(), Ready)
    if busy:
        made.send(Submit("a", [5], helpers.greedy(250, ignore_eos=True)))
        made.receive()
    assert not ended(pid, 0.3)
    os.kill(parent, signal.SIGKILL)
    assert ended(pid, 5)


def test_it_ends_with_a_server_that_no_longer_listens(server, nursery, helpers):
    """More is to be said than the sockets hold: waiting for a reader must not outlast the server."""
    made = server()
    made.pull.rcvhwm = 1
    pid, parent = nursery.start(made, between=True)
    assert isinstance(made.receive(), Ready)
    data = msgspec.msgpack.encode(Submit("empty", [], helpers.greedy(1)))
    full = 0.0
    while not full or time.monotonic() - full < 0.5:  # until the worker has stopped reading too
        try:
            made.push.send(data, zmq.NOBLOCK)
            full = 0.0
        except zmq.Again:
            full = full or time.monotonic()
            time.sleep(0.01)
    assert not ended(pid, 0.3)
    os.kill(parent, signal.SIGKILL)
    assert ended(pid, 5)


def test_stop_ends_it_at_work(server, nursery, helpers):
    made = server()
    pid, _ = nursery.start(made)
    made.receive()
    made.send(Submit("a", [5], helpers.greedy(250, ignore_eos=True)))
    made.receive()
    since = time.monotonic()
    made.send(Stop())
    assert nursery.code(pid) == 0
    assert time.monotonic() - since < 5
