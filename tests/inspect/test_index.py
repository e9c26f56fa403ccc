"""The index of upstream's structures: built from sources, kept by digest, asked for neighbours."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from dz.core.registry import Registry
from dz.errors import EnvironmentFailure
from dz.inspect import index
from dz.inspect.fingerprints import fingerprints
from dz.inspect.syntax import File, live
from dz.upstream import sources

NORM = """
class {name}(nn.Module):
    def __init__(self, {width}, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones({width}))
        self.variance_epsilon = eps

    def forward(self, {x}):
        variance = {x}.to(torch.float32).pow(2).mean(-1, keepdim=True)
        {x} = {x} * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * {x}
"""
GATE = """
class Gate(nn.Module):
    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x) + self.rest(x).sum(-1, keepdim=True))

class Whole(FirstPreTrainedModel):
    def forward(self, x):
        return self.down(self.gate(x) * self.up(x).softmax(-1).transpose(1, 2))

class Heir(Gate):
    pass

def turn(q, cos, sin):
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), dim=-1) * sin
"""


@pytest.fixture
def tree(tmp_path):
    """A small package of two modelling files."""
    files = {
        "up.models.one.modeling_one": NORM.format(name="OneNorm", x="x", width="n") + GATE,
        "up.models.two.modeling_two": NORM.format(name="TwoNorm", x="hidden", width="size"),
    }
    paths = {}
    for name, text in files.items():
        paths[name] = tmp_path / f"{name}.py"
        paths[name].write_text(text)
    return sources.Sources(tmp_path, "1.0", paths)


def test_copies_are_one_structure(tree):
    found = {tuple(name for name, _ in e.places) for e in index.build(tree)}
    assert ("up.models.one.modeling_one:OneNorm", "up.models.two.modeling_two:TwoNorm") in found
    assert ("up.models.one.modeling_one:Gate", "up.models.one.modeling_one:Heir") in found
    assert not any("Whole" in n for names in found for n in names)
    assert [e.function for e in index.build(tree) if e.places[0][0].endswith(":turn")] == [True]


def test_neighbours_are_ordered_and_leave_out_the_place_itself(tree):
    held = index.Index(tree, index.build(tree))
    norm = File(NORM.format(name="Mine", x="a", width="b").replace(".pow(2)", ".pow(2).float()")).piece("Mine").form()
    first, *rest = held.nearest(norm, function=False)
    assert (first.name, first.copies) == ("up.models.one.modeling_one:OneNorm", 1)
    assert 0.4 < first.likeness < 1
    assert all(first.likeness >= n.likeness for n in rest)
    same = File(NORM.format(name="OneNorm", x="x", width="n")).piece("OneNorm").form()
    apart = held.nearest(same, function=False, apart="up.models.one.modeling_one:OneNorm")[0]
    assert (apart.name, apart.likeness, apart.copies) == ("up.models.two.modeling_two:TwoNorm", 1.0, 0)
    assert held.nearest(same, function=True) == []
    assert held.nearest(same, function=False, among=frozenset()) == []


def test_an_index_is_kept_and_told_by_the_sources(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "installed_sources", lambda: tree)
    first = index.load(folder=tmp_path / "cache")
    monkeypatch.setattr(index, "build", lambda *_: pytest.fail("it was kept"))
    assert index.load(folder=tmp_path / "cache").entries == first.entries
    path = next((tmp_path / "cache").iterdir())
    assert "variance_epsilon" not in path.read_text()
    monkeypatch.undo()
    path.write_text(path.read_text()[:40])
    monkeypatch.setattr(index, "installed_sources", lambda: tree)
    assert index.load(folder=tmp_path / "cache").entries == first.entries
    tree.files["up.models.two.modeling_two"].write_text("x = 1\n")
    assert len(index.load(folder=tmp_path / "cache").entries) == len(first.entries)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_said(tree, tmp_path, monkeypatch):
    class Said:
        notes: list[str] = []  # noqa: RUF012

        def start(self, *_, **__): ...
        def advance(self, *_): ...
        def finish(self, *_): ...
        def note(self, text):
            self.notes.append(text)

    monkeypatch.setattr(index, "installed_sources", lambda: tree)
    (tmp_path / "file").write_text("")
    assert index.load(folder=tmp_path / "file", progress=Said()).entries
    assert "the index is not kept" in Said.notes[0]


def test_no_sources_is_an_environment_failure(monkeypatch):
    monkeypatch.setattr(sources, "PACKAGE", "dz_no_such_package")
    with pytest.raises(EnvironmentFailure, match="no modelling sources"):
        sources.installed_sources()


def test_the_installed_upstream_is_indexed_in_good_time():
    """A part of it: the whole takes seconds, and its time is that of its files."""
    found = sources.installed_sources()
    part = replace(found, files=dict(list(found.files.items())[::20]))
    started = time.perf_counter()
    entries = index.build(part)
    assert (time.perf_counter() - started) * 20 < 120
    assert len(entries) > 100
    assert all(e.features == sorted(e.features) and e.places for e in entries)


def test_live_and_file_forms_agree():
    from transformers.models.llama import modeling_llama as m

    file = File(sources.installed_sources().files[m.__name__].read_text("utf-8"))
    norm = live(m.LlamaRMSNorm(8))
    assert norm.form() == file.piece("LlamaRMSNorm").form()
    assert live(m.apply_rotary_pos_emb).form().digest == file.piece("apply_rotary_pos_emb").form().digest
    assert live(m.LlamaRMSNorm(8)).form().digest in fingerprints()["rms_norm"]


def test_fingerprints_name_ops_that_exist():
    ops = Registry.discover().ops
    assert fingerprints()
    assert set(fingerprints()) <= set(ops)
