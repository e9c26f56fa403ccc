"""A plan in a live model: the kernels run, are counted, and leave no trace."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from dz.core import jsonio
from dz.core.inventory import Arg, Binding, Site
from dz.core.kernel import Kernel, Requires, Support
from dz.core.op import Op
from dz.core.plan import Choice, Plan, SitePlan
from dz.core.registry import Registry
from dz.errors import Refused
from dz.ops.precision import ELEMENTWISE
from dz.swap import bind, capture


def reference(x, factor=2.0):
    return x * factor


def add_one(x, factor=2.0):
    return x * factor + 1


def twice(x, factor):
    """A function of a modelling file."""
    return x * factor


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 2.0

    def forward(self, x, extra=None):
        out = x * self.factor
        return out if extra is None else out + extra


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return twice(x, 1.0)


BINDING = Binding(
    args=(Arg(name="x", source="forward", path="x"), Arg(name="factor", source="attribute", path="factor"))
)
FUNCTION = Binding(
    args=(Arg(name="x", source="forward", path="x"), Arg(name="factor", source="forward", path="factor"))
)


@pytest.fixture
def registry():
    out = Registry()
    out.add_op(Op(name="scale", summary="", reference=reference, tolerance=ELEMENTWISE))
    odd = lambda args: Support(args["x"].shape[-1] != 5, "five columns")  # noqa: E731
    out.add_kernel(Kernel(op="scale", technique="plus", summary="", run=add_one, requires=Requires(), supports=odd))
    return out


def plan(*sites):
    return Plan(model="m", rev8="0a1b2c3d", device="cpu", dtype="float32", sites=sites)


def module_site(prefill="upstream", decode="scale/plus", members=("layers.0", "layers.1")):
    phases = {"prefill": Choice(impl=prefill, reason="r"), "decode": Choice(impl=decode, reason="r")}
    return SitePlan(
        site="layers.*", op="scale", status="known", count=2, phases=phases, members=members, binding=BINDING
    )


def function_site():
    phases = {p: Choice(impl="scale/plus", reason="r") for p in ("prefill", "decode")}
    return SitePlan(
        site=f"{__name__}:twice",
        op="scale",
        status="known",
        count=1,
        phases=phases,
        kind="function",
        members=("",),
        binding=FUNCTION,
    )


def test_each_phase_runs_its_own_choice_and_is_counted(registry):
    model, x = Model(), torch.ones(3)
    phase = ["prefill"]
    with bind(model, plan(module_site()), registry, lambda: phase[0]) as applied:
        assert torch.equal(model(x), x * 4)
        phase[0] = "decode"
        assert torch.equal(model(x), (x * 2 + 1) * 2 + 1)
    assert applied.calls == {"layers.*|scale/plus|decode": 2}
    assert torch.equal(model(x), x * 4)
    assert all("forward" not in vars(m) for m in model.modules())


def test_a_plan_survives_json(registry):
    again = jsonio.from_builtins(Plan, jsonio.to_builtins(plan(module_site(), function_site())))
    with bind(Model(), again, registry, lambda: "decode") as applied:
        assert len(applied.calls) == 3


def test_functions_are_rebound_in_their_file_and_back(registry):
    before = sys.modules[__name__].twice
    with bind(Model(), plan(function_site()), registry, lambda: "decode") as applied:
        assert torch.equal(Model()(torch.ones(2)), torch.full((2,), 5.0))
        assert twice is not before
    assert twice is before
    assert {k.rpartition("|")[2]: n for k, n in applied.calls.items()} == {"prefill": 0, "decode": 1}


def test_the_reference_counts_under_the_op(registry):
    with bind(Model(), plan(module_site(decode="reference")), registry, lambda: "decode") as applied:
        pass
    assert list(applied.calls) == ["layers.*|scale/reference|decode"]


def test_calls_that_are_not_covered_go_to_upstream_and_are_said(registry):
    model, heard = Model(), []
    with bind(model, plan(module_site()), registry, lambda: "decode", tell=heard.append) as applied:
        assert torch.equal(model.layers[0](torch.ones(2), torch.ones(2)), torch.full((2,), 3.0))
        assert torch.equal(model.layers[0](torch.ones(5)), torch.full((5,), 2.0))
        assert torch.equal(model.layers[0](torch.ones(5)), torch.full((5,), 2.0))
        assert torch.equal(model.layers[0](x=torch.ones(2), extra=None), torch.full((2,), 3.0))
    assert applied.calls["layers.*|upstream|decode"] == 3
    assert sorted(heard) == [
        "layers.* runs upstream's code in decode: an argument that is not bound",
        "layers.* runs upstream's code in decode: five columns",
    ]
    assert applied.calls["layers.*|scale/plus|decode"] == 1
    assert applied.declined["layers.*|upstream|decode"] == "five columns"


def test_undone_after_an_error(registry):
    model = Model()
    with pytest.raises(ZeroDivisionError), bind(model, plan(module_site()), registry, lambda: "decode"):
        1 / 0  # noqa: B018
    assert all("forward" not in vars(m) for m in model.modules())


def test_half_a_bind_is_undone(registry):
    model = Model()
    sites = plan(module_site(members=("layers.0",)), module_site(members=("layers.7",)))
    with pytest.raises(Refused, match="no such place"), bind(model, sites, registry, lambda: "decode"):
        pass
    assert "forward" not in vars(model.layers[0])


def test_a_foreign_replacement_is_not_hidden(registry):
    model = Model()
    with (
        pytest.raises(RuntimeError, match="replaced by something else"),
        bind(model, plan(module_site()), registry, lambda: "decode"),
    ):
        model.layers[1].forward = lambda x: x


def test_an_instance_forward_that_was_there_before_comes_back(registry):
    model = Model()
    model.layers[0].forward = own = lambda x: x * 7
    with bind(model, plan(module_site()), registry, lambda: "decode"):
        assert model.layers[0].forward is not own
    assert vars(model.layers[0])["forward"] is own


def test_capture_records_copies_and_leaves_nothing():
    model = Model()
    site = Site(id="layers.*", kind="module", cls="Layer", where="", members=("layers.0", "layers.1"), status="known")
    x = torch.ones(2)
    with capture(model, site, most=3) as calls:
        model(x)
        model(x)
    x.zero_()
    assert [c.member for c in calls] == ["layers.0", "layers.1", "layers.0"]
    assert torch.equal(calls[1].args[0], torch.full((2,), 2.0))
    assert torch.equal(calls[1].result, torch.full((2,), 4.0))
    assert all("forward" not in vars(m) for m in model.modules())
