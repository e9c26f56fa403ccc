"""Upstream is asked once for each question, and again when anything it depends on has changed."""

from dataclasses import replace
from importlib import metadata

import pytest
import torch
from safetensors.torch import save_file

from dz.accept import golden
from dz.core.protocols import Silent
from dz.errors import EnvironmentFailure, Refused
from dz.upstream.reference import Answer, Case, Facts, Run

FACTS = Facts(
    cls="Toy", runs="transformers", dtype="float32", vocab_size=9, max_positions=9, eos_token_ids=[2], images=False,
    vision="", chat="", tokenizer="", versions={},
)  # fmt: skip


class FakeSession:
    """Counts what it is asked; `full` dtypes fit only alone."""

    asked, open, full = [], set(), False

    def __init__(self, source, *, dtype, **_):
        self.dtype = dtype

    def __call__(self, cases, *, dense=None, limit=None):
        if FakeSession.full and FakeSession.open - {self.dtype}:
            raise EnvironmentFailure("does not fit", "-", "-", code="no_memory")
        FakeSession.open.add(self.dtype)
        FakeSession.asked += [(self.dtype, c.id, c.tokens) for c in cases]
        if dense is not None:
            save_file({c.id: torch.ones(len(c.tokens), 9) for c in cases}, dense)
        error = {99: "ValueError: no"}
        return Run(
            facts=FACTS, answers=[Answer(id=c.id, prompt=c.tokens, error=error.get(c.tokens[0], "")) for c in cases]
        )

    def close(self):
        FakeSession.open.discard(self.dtype)


@pytest.fixture
def make(tmp_path, lock, monkeypatch):
    monkeypatch.setattr(golden, "Session", FakeSession)
    monkeypatch.setattr(FakeSession, "asked", [])
    monkeypatch.setattr(FakeSession, "open", set())
    monkeypatch.setattr(FakeSession, "full", False)

    def build(changed=lock, trust=False, plugins=()):
        log = tmp_path / "reference.log"
        return golden.Golden(changed, tmp_path / "golden", trust=trust, plugins=plugins, log=log, progress=Silent())

    return build


def case(first, name="a"):
    return Case(id=name, tokens=[first, 5], max_tokens=3)


def test_asked_once_whatever_the_id(make):
    one = make()
    assert [a.prompt for a in one.ask([case(1), case(2, "b")])] == [[1, 5], [2, 5]]
    again = make().ask([case(2, "x"), case(1, "y"), case(3, "z")])
    assert [(a.id, a.prompt[0]) for a in again] == [("x", 2), ("y", 1), ("z", 3)]
    assert [t[0] for _, _, t in FakeSession.asked] == [1, 2, 3]


def test_facts_need_one_run(make):
    assert make().facts() == FACTS
    FakeSession.open.clear()
    assert make().facts() == FACTS and FakeSession.open == set()


def test_the_same_question_twice_in_one_ask(make):
    a, b = make().ask([case(4, "a"), case(4, "b")])
    assert (a.id, b.id, a.prompt) == ("a", "b", b.prompt) and len(FakeSession.asked) == 1


@pytest.mark.parametrize("what", ["weights", "code", "trust", "version", "dtype", "tokens", "plugins"])
def test_asked_again_when_it_matters(make, lock, what, monkeypatch):
    make().ask([case(1)])
    changed, trust, dtype, asked = lock, False, "float32", case(1)
    if what == "weights":
        changed = replace(lock, stamps={"model.safetensors": 5})
    elif what == "code":
        changed = replace(lock, source=replace(lock.source, code_hash="ff"))
    elif what == "trust":
        trust = True
    elif what == "version":
        monkeypatch.setattr(metadata, "version", lambda name: "99")
    elif what == "dtype":
        dtype = "bfloat16"
    else:
        asked = Case(id="a", tokens=[1, 5], max_tokens=4)
    make(changed, trust, ("a:b",) if what == "plugins" else ()).ask([asked], dtype)
    assert len(FakeSession.asked) == 2


def test_a_picture_counts_by_its_pixels(make, tmp_path):
    path = tmp_path / "p.png"
    chat = Case(id="c", tokens=[1], messages=[{"role": "user", "content": [{"type": "image", "path": str(path)}]}])
    for data in (b"one", b"two", b"one"):
        path.write_bytes(data)
        make().ask([chat])
    assert len(FakeSession.asked) == 2


def test_errors_are_not_kept(make):
    for _ in range(2):
        assert make().ask([case(99)])[0].error
    assert len(FakeSession.asked) == 2


def test_scores_are_kept(make):
    assert make().scores([1, 2, 3]).shape == (3, 9)
    assert make().scores([1, 2, 3]).shape == (3, 9) and len(FakeSession.asked) == 1
    with pytest.raises(Refused) as e:
        make().scores([99, 1])
    assert "ValueError" in e.value.why


def test_two_dtypes_that_do_not_fit_together(make, monkeypatch):
    one = make()
    one.ask([case(1)])
    monkeypatch.setattr(FakeSession, "full", True)
    one.ask([case(1)], "bfloat16")
    assert FakeSession.open == {"bfloat16"}
    one.close()
    assert FakeSession.open == set()
    with pytest.raises(EnvironmentFailure):
        FakeSession.open.add("other process")
        one.ask([case(2)])
