"""A real server (uvicorn, tokenizer, sockets, worker process) over the fake engine, on a free port."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

import dz

HERE = Path(__file__).parent
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

    def __init__(self, process, url, lines):
        self.process, self.url, self.lines = process, url, lines
        self.http = httpx.Client(base_url=url, timeout=20)

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
            assert time.monotonic() < end, "".join(self.lines)
            time.sleep(0.02)


@contextlib.contextmanager
def run(model, *, wait=True, config=None, settings=None):
    """Start the server process; `config` are fields of ServeConfig, `settings` those of the fake engine."""
    document = {"model": str(model), "engine": ENGINE, "config": config or {}, "settings": settings or {}}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "run_server.py"), json.dumps(document)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(dz.__file__).resolve().parent.parent)},
    )
    lines, found = [], threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready: " if wait else "listening: "):
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(60)
        url = next((x.split()[1] for x in lines if x.startswith(("ready: ", "listening: "))), "http://unready")
        served = Served(process, url, lines)
        yield served
        served.http.close()
    finally:
        process.kill()
        process.wait()
        reader.join(5)


@pytest.fixture(scope="session")
def server(model):
    """One shared server that nothing in the tests breaks."""
    with run(model, settings={"chunk": 1}) as served:
        yield served


@pytest.fixture
def start(model):
    """A function that starts servers of one's own; they end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(run(model, **options))
