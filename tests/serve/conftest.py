"""A real server (uvicorn, tokenizer, sockets, worker process) over the fake engine, on a free port."""

import contextlib
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import httpx
import pytest

import dz

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import run_server  # noqa: E402

FORKS = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session", autouse=True)
def imports_once(model):
    """Servers are forked from a process that has imported everything, and loaded the tokenizer once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(Path(dz.__file__).resolve().parent.parent)]))
        patch.setenv("WARM_UP", str(model))
        FORKS.set_forkserver_preload(["run_server"])
        forkserver.ensure_running()


ENGINE = str(HERE / "fake_engine.py")
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(folder, template=TEMPLATE):
    """A byte-level BPE tokenizer with special tokens, saved with a tiny configuration."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", END, "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(["the quick brown fox jumps over the lazy dog, then the end of the story " * 20], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=END, pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    Path(folder, "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer(folder)
    return folder


class Served:
    """A running `serve()` in a process of its own."""

    def __init__(self, process, log):
        self.process, self.log = process, log
        self.url = ""
        self.http = httpx.Client(timeout=20)

    @property
    def text(self):
        """What it has said on stderr."""
        return self.log.read_text()

    def up(self, word):
        """Wait for the line `word: URL`."""
        self.wait(lambda: re.search(rf"^{word}: ", self.text, re.M) or not self.process.is_alive(), 60)
        found = re.search(rf"^{word}: (\S+)", self.text, re.M)
        assert found, self.text
        self.url = found.group(1)
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def complete(self, prompt, **body):
        """choices[0] of a completion."""
        answer = self.post("/v1/completions", prompt=prompt, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def stream(self, path, **body):
        """The events of a stream, without [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name):
        """The sum of a metric's samples."""
        rows = [r for r in self.http.get("/metrics").text.splitlines() if r.startswith((name + "{", name + " "))]
        return sum(float(r.rpartition(" ")[2]) for r in rows)

    def wait(self, check, seconds=10.0):
        """Wait until check() is true."""
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, self.text
            time.sleep(0.01)


@contextlib.contextmanager
def run(model, log, *, until="ready", config=None, settings=None):
    """Start the server process; `config` are fields of ServeConfig, `settings` those of the fake engine."""
    document = {"model": str(model), "engine": ENGINE, "config": config or {}, "settings": settings or {}}
    process = FORKS.Process(target=run_server.main, args=(document, str(log)))
    log.touch()
    process.start()
    served = Served(process, log)
    try:
        if until:
            served.up(until)
        yield served
    finally:
        served.http.close()
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def server(model, tmp_path_factory):
    """One shared server that nothing in the tests breaks."""
    with run(model, tmp_path_factory.mktemp("server") / "log", settings={"chunk": 1}) as served:
        yield served


@pytest.fixture(scope="session")
def chunky(model, tmp_path_factory):
    """Another whose engine sends three tokens at a time."""
    with run(model, tmp_path_factory.mktemp("chunky") / "log", settings={"chunk": 3}) as served:
        yield served


@pytest.fixture
def start(model, tmp_path):
    """A function that starts servers of one's own; they end with the test."""
    count = itertools.count()
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(run(model, tmp_path / f"log{next(count)}", **options))
