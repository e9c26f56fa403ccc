"""A context for checks: a fake server of a toy model, and an oracle that knows the toy model's right answers."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from dz.accept.context import Context
from dz.accept.server import Given, Own
from dz.core.protocols import Silent
from dz.core.source import Source
from dz.core.workspace import Workspace
from dz.hub.lock import Lock
from dz.upstream.reference import Answer, Facts

HERE = Path(__file__).parent


def _load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


toy = _load("toy_model")
fake_server = _load("fake_server")


class Oracle:
    """Upstream's side. `vision`, `chat`, `tokenizer` are the reasons why there is none; `low` maps a dtype to how much
    sharper its distributions are; `problem` is raised instead of an answer; `looks_ahead` breaks causality."""

    def __init__(
        self, images=True, vision="", chat="", tokenizer="", problem=None, looks_ahead=False, low=None, refuses=()
    ):
        self.images, self.reasons = images, (vision, chat, tokenizer)
        self.problem, self.looks_ahead = problem, looks_ahead
        self.low, self.refuses, self.asked = low or {}, refuses, []

    def facts(self):
        vision, chat, tokenizer = self.reasons
        return Facts(
            cls="Toy", runs="transformers", dtype="float32", vocab_size=toy.VOCAB, max_positions=600,
            eos_token_ids=[toy.EOS], images=self.images, vision=vision, chat=chat, tokenizer=tokenizer, versions={},
        )  # fmt: skip

    def ask(self, cases, dtype="float32", *, limit=None):
        self.asked += [(c, dtype) for c in cases]
        return [self._answer(c, dtype) for c in cases]

    def _answer(self, case, dtype):
        if self.problem is not None and case.kind != "tokenize":
            raise self.problem
        if case.id in self.refuses:
            return Answer(id=case.id, error="ValueError: not like this")
        prompt = list(case.tokens) or (toy.encode(case.text) if case.text else self._chat(case.messages))
        if case.length:
            prompt = (prompt * -(-case.length // len(prompt)))[: case.length]
        if case.kind == "tokenize":
            return Answer(id=case.id, prompt=prompt)
        tokens, stop, rows = toy.generate(prompt, case.max_tokens)
        if case.kind == "score":
            tokens, stop, rows = [], None, [toy.logprobs(prompt[: i + 1]) for i in range(case.start, len(prompt))]
        sharper = self.low.get(dtype, 1.0)
        if sharper != 1.0:
            rows = [torch.log_softmax(torch.tensor(r).double() * sharper, -1).tolist() for r in rows]
        top = [toy.best(row, 30) for row in rows]
        margins = [t[0][1] - t[1][1] for t in top]
        return Answer(id=case.id, prompt=prompt, tokens=tokens, stop_token=stop, margins=margins, top=top)

    @staticmethod
    def _chat(messages):
        return toy.encode_chat(messages, lambda part: Path(part["path"]).read_bytes())

    def scores(self, tokens, dtype="float32"):
        rows = torch.tensor([toy.logits(tokens[: i + 1]) for i in range(len(tokens))])
        return rows + rows.mean(0) * 0.1 if self.looks_ahead else rows

    def close(self):
        pass


@pytest.fixture(name="oracle")
def _oracle():
    """The class of oracles."""
    return Oracle


@pytest.fixture
def lock(tmp_path):
    """A lock of a folder that holds nothing but a configuration."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    source = Source(name="org/toy", folder=str(folder), commit="", rev8="01234567", code_hash="", files=())
    return Lock(source=source)


@pytest.fixture
def context(tmp_path, lock):
    """Make a context: faults of the server, the oracle, the dtype; `process` starts the server as one."""
    made = []

    def make(faults=None, *, golden=None, dtype="float32", process=False):
        if process:
            command = [sys.executable, str(HERE / "fake_server.py"), "--faults", json.dumps(faults or {})]
            server = Own(command, tmp_path / "reports/org--toy@01234567/default/evidence/server.log")
        else:
            fake = fake_server.Fake(faults).start()
            made.append(fake.shutdown)
            made.append(fake.server_close)
            server = Given(fake.url)
        made.append(server.stop)
        space = Workspace.of(lock.source, tmp_path / "reports")
        return Context(
            lock=lock, workspace=space, name="default", inventory=space.inventory, dtype=dtype,
            server=server, golden=golden or Oracle(), progress=Silent(),
        )  # fmt: skip

    yield make
    for end in reversed(made):
        end()
