"""A whole plan: made, proved on real weights, written, found current, found stale with the reason."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dz import adapt
from dz.adapt import digests
from dz.cli import main as cli
from dz.core import jsonio
from dz.core.envelope import validate
from dz.core.kernel import Kernel, Requires
from dz.core.protocols import Silent
from dz.core.registry import Registry
from dz.errors import Refused
from dz.settings import resolve


@pytest.fixture
def repository(tiny, tmp_path):
    return tiny.write(tmp_path / "m", tiny.LLAMA)


@pytest.fixture
def made(repository, tmp_path, monkeypatch):
    """Arguments of a command on a tiny model, as `source` and keyword arguments."""
    from dz import hub

    settings = resolve({"workspace": str(tmp_path / "ws"), "device": "cpu"}, no_config=True, env={})
    source = hub.resolve(str(repository), workspace=tmp_path / "ws")
    return source, {"trust": False, "device": "cpu", "settings": settings}


class Notes(Silent):
    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


def choices(plan, op):
    return [c for s in plan.sites if s.op == op for c in s.phases.values()]


def test_a_plan_is_proved_on_the_real_weights(made):
    source, where = made
    inventory, plan = adapt.make_plan(source, **where)
    assert inventory.coverage.complete
    for op in ("rms_norm", "gated_activation"):
        for c in choices(plan, op):
            assert c.impl == f"{op}/torch"
            assert c.verified.data == "real weights"
            assert c.verified.cases == 9
    assert {c.impl for c in choices(plan, "linear")} == {"upstream"}
    attention = next(s for s in plan.sites if s.op == "attention")
    assert attention.phases["decode"].tier == "gather"
    assert len(plan.swaps()) == 4
    assert all(s.members and s.binding for s in plan.swaps())


def test_a_broken_kernel_loses_its_place_with_the_numbers(made):
    source, where = made
    registry = Registry.discover()
    del registry.kernels["rms_norm/torch"]
    reference = registry.op("rms_norm").reference

    def off(x, weight=None, *, eps=1e-6, **rest):
        return reference(x, weight, eps=eps * 2, **rest)

    registry.add_kernel(Kernel(op="rms_norm", technique="torch", summary="", run=off, requires=Requires()))
    _, plan = adapt.make_plan(source, registry=registry, **where)
    for c in choices(plan, "rms_norm"):
        assert c.impl == "upstream"
        failed = next(r for r in c.rejected if r.impl == "rms_norm/torch")
        assert "failed verification" in failed.reason
        assert "beyond" in failed.reason


def test_without_weights_the_proof_says_so(tiny, tmp_path):
    source = tiny.source(tiny.write(tmp_path / "bare", tiny.LLAMA, weights=False))
    settings = resolve({"workspace": str(tmp_path / "ws")}, no_config=True, env={})
    inventory, plan = adapt.make_plan(source, trust=False, device="cpu", settings=settings)
    assert {c.verified.data for c in choices(plan, "rms_norm")} == {"random weights"}
    assert inventory.bytes == 0


def test_a_device_that_is_not_here_is_planned_for_not_run(made):
    source, where = made
    _, plan = adapt.make_plan(source, **{**where, "device": "cuda:sm90"})
    assert plan.device == "cuda:sm90"
    for c in choices(plan, "rms_norm"):
        assert c.impl == "rms_norm/triton"
        assert c.verified is None
        assert "not verified" in c.reason


def test_current_plan_makes_keeps_and_remakes(made):
    source, where = made
    notes = Notes()
    first = adapt.current_plan(source, progress=notes, **where)
    assert "since there is none" in notes.lines[0]
    notes.lines.clear()
    assert adapt.current_plan(source, progress=notes, **where).hash == first.hash
    assert adapt.current_plan(source, frozen=True, **where).hash == first.hash
    assert notes.lines == []
    other = {
        **where,
        "settings": resolve(
            {"workspace": where["settings"].get("workspace"), "dtype": "bfloat16"}, no_config=True, env={}
        ),
    }
    with pytest.raises(Refused, match="no current plan") as e:
        adapt.current_plan(source, frozen=True, **other)
    assert "dtype: auto -> bfloat16" in e.value.why
    again = adapt.current_plan(source, progress=notes, **other)
    assert (again.dtype, again.hash == first.hash) == ("bfloat16", False)
    assert "dtype" in notes.lines[0]


def test_a_remade_plan_keeps_the_choices_it_was_made_with(made):
    source, where = made
    inventory, plan = adapt.make_plan(source, sets=["rms_norm=upstream"], **where)
    adapt.write(source, where["settings"], inventory, plan)
    assert adapt.drift(source, **where).changed == ()
    assert adapt.drift(source, sets=[], **where).changed == ("set: rms_norm=upstream -> ",)
    path = next(Path(where["settings"].get("workspace")).glob("*/plan.json"))
    document = json.loads(path.read_text())
    document["data"]["inputs"]["version of torch"] = "0.1"
    path.write_text(json.dumps(document))
    found = adapt.drift(source, **where)
    assert len(found.changed) == 1
    assert found.changed[0].startswith("version of torch: 0.1 -> ")
    remade = adapt.current_plan(source, **where)
    assert {c.impl for c in choices(remade, "rms_norm")} == {"upstream"}


def test_documents_are_valid_and_equal_inputs_give_equal_hashes(made, tmp_path):
    source, where = made
    inventory, plan = adapt.make_plan(source, **where)
    path = adapt.write(source, where["settings"], inventory, plan)
    for file in (path, path.with_name("inventory.json")):
        validate(jsonio.read(file))
    assert adapt.make_plan(source, **where)[1].hash == plan.hash
    assert adapt.make_plan(source, sets=["rms_norm=upstream"], **where)[1].hash != plan.hash


def run(capsys, *argv):
    code = cli.main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DZ_WORKSPACE", str(tmp_path / "ws"))
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "adapt", str(repository), "--dry-run")
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["SITE", "OP", "N"]
    assert "16 ops known, 0 variant, 0 unknown. Plan " in out
    assert "nothing written" in out
    assert f"hint: dz accept {repository}" in err
    assert not list(tmp_path.glob("ws/*/plan.json"))
    assert run(capsys, "adapt", str(repository), "--check")[0] == 1
    code, out, _ = run(capsys, "adapt", str(repository), "-q")
    assert code == 0
    hash_ = out.strip()
    assert run(capsys, "adapt", str(repository), "--check")[:2] == (0, f"the plan {hash_[:8]} is current\n")
    code, out, _ = run(capsys, "adapt", str(repository), "--json")
    document = json.loads(out)
    validate(document)
    assert (code, document["data"]["hash"], document["status"]) == (0, hash_, "ok")
    held = load_file(repository / "model.safetensors")
    save_file({k: v for k, v in held.items() if "norm" not in k}, repository / "model.safetensors")
    code, out, _ = run(capsys, "adapt", str(repository), "--check", "--json")
    assert code == 1
    validate(json.loads(out))


def test_drift_names_the_kernel_that_changed(made, monkeypatch):
    source, where = made
    inventory, plan = adapt.make_plan(source, **where)
    adapt.write(source, where["settings"], inventory, plan)
    registry = Registry.discover()

    def moved(x, weight=None, **rest):
        return x

    registry.kernels["rms_norm/torch"] = Kernel(
        op="rms_norm", technique="torch", summary="", run=moved, requires=Requires()
    )
    found = adapt.drift(source, registry=registry, **where)
    assert [c.partition(":")[0] for c in found.changed] == ["kernel rms_norm/torch"]


@pytest.mark.parametrize("changed", ["op/fast.py", "op/parts.py", "op/tuned.json", "common/launch.py"])
def test_whatever_a_kernel_may_use_is_in_its_digest(tmp_path, monkeypatch, changed):
    for name in ("op/fast.py", "op/parts.py", "op/tuned.json", "common/launch.py", "other/fast.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def run(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path / "op"))
    monkeypatch.delitem(sys.modules, "fast", raising=False)
    registry = Registry()
    registry.kernels["op/fast"] = Kernel(
        op="op", technique="fast", summary="", run=importlib.import_module("fast").run, requires=Requires()
    )
    before = digests._kernel(registry, "op/fast")
    (tmp_path / "other" / "fast.py").write_text("")
    assert digests._kernel(registry, "op/fast") == before
    (tmp_path / changed).write_text("{}")
    assert digests._kernel(registry, "op/fast") != before


def test_unknown_sites_are_listed_plainly(tiny, tmp_path, monkeypatch, capsys):
    folder = tiny.write(tmp_path / "hybrid", tiny.HYBRID)
    monkeypatch.setenv("DZ_WORKSPACE", str(tmp_path / "ws"))
    code, out, _ = run(capsys, "adapt", str(folder), "--dry-run")
    line = next(x for x in out.splitlines() if x.startswith("model.layers.*.conv "))
    assert code == 0
    assert "- (unknown)" in line
    assert "isolate" in line
    assert "unknown: runs on upstream's code" in line
