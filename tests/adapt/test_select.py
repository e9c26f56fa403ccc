"""The choice at one site: rank of wishes, proof, what is turned down and why."""

import pytest

from dz.adapt.select import Chooser
from dz.adapt.wishes import Wish, parse_set
from dz.core.device import Device
from dz.core.inventory import Arg, Binding, Mixer, Site
from dz.core.kernel import Kernel, Requires
from dz.core.op import Op
from dz.core.plan import Verified
from dz.core.registry import Registry
from dz.errors import Refused
from dz.ops.precision import ELEMENTWISE
from dz.verify.sites import Verdict

BINDING = Binding(args=(Arg(name="x", source="forward", path="x"),))
PROOF = Verified(level="op", max_err=1e-7, tol="t", cases=4)


def registry(*techniques, **requires):
    out = Registry()
    out.add_op(Op(name="op", summary="", reference=lambda x: x, tolerance=ELEMENTWISE))
    for t in techniques:
        need = requires.get(t, Requires())
        out.add_kernel(Kernel(op="op", technique=t, summary="", run=lambda x: x, requires=need))
    return out


def site(**more):
    given = {"status": "known", "op": "op", "binding": BINDING, **more}
    return Site(id="a.*", kind="module", cls="A", where="", members=("a.0", "a.1"), **given)


def choose(reg, wishes=(), at=None, phase="decode", prove=lambda s, k, p: Verdict(True, "", PROOF)):
    return Chooser(reg, Device(kind="cpu", name="cpu"), "float32", list(wishes), prove).choose(at or site(), phase)


def prefer(*values):
    return Wish("op", values, "", "", "prefer", "recipe r")


def require(*values):
    return Wish("op", values, "", "", "require", "recipe r")


def fails(*techniques):
    def prove(s, k, p):
        name = "reference" if k is None else k.technique
        return Verdict(False, f"{name} is off by 3") if name in techniques else Verdict(True, "", PROOF)

    return prove


def test_the_first_wish_that_proves_itself_wins_and_the_others_are_listed():
    found = choose(registry("a", "b", "c"), [prefer("a", "b", "c")], prove=fails("a"))
    assert (found.impl, found.reason, found.verified) == ("op/b", "recipe r", PROOF)
    assert [(r.impl, r.reason) for r in found.rejected] == [("op/a", "a is off by 3")]


def test_requirements_of_the_hardware_are_reasons():
    reg = registry("a", "b", a=Requires(device=("cuda",)))
    found = choose(reg, [prefer("a", "b")])
    assert found.impl == "op/b"
    assert found.rejected[0].reason == "needs cuda, the device is cpu"


def test_the_only_eligible_kernel_needs_no_wish():
    assert choose(registry("a")).impl == "op/a"
    assert choose(registry()).impl == "upstream"
    assert choose(registry()).reason == "no kernel for this op"


def test_dz_does_not_guess():
    with pytest.raises(Refused, match="several kernels fit"):
        choose(registry("a", "b"))


def test_when_nothing_proves_itself_upstream_runs_and_the_numbers_stay():
    found = choose(registry("a"), [prefer("a")], prove=fails("a"))
    assert found.impl == "upstream"
    assert found.rejected[0].reason == "a is off by 3"
    assert found.verified is None


def test_upstream_and_reference_are_choices():
    assert choose(registry("a"), [parse_set("op=upstream")]).impl == "upstream"
    assert choose(registry("a"), [parse_set("op=reference")]).impl == "reference"
    with pytest.raises(Refused, match="cannot be met") as e:
        choose(registry("a"), [parse_set("op=reference")], prove=fails("reference"))
    assert "off by 3" in e.value.why


@pytest.mark.parametrize("wish", [parse_set("op=a"), require("a")])
def test_explicit_and_required_wishes_are_met_or_refused(wish):
    assert choose(registry("a", "b"), [wish]).impl == "op/a"
    with pytest.raises(Refused, match="cannot be met"):
        choose(registry("a", "b"), [wish, prefer("b")], prove=fails("a"))


def test_phases_choose_apart():
    wishes = [parse_set("op/prefill=a"), prefer("b")]
    assert choose(registry("a", "b"), wishes, phase="prefill").impl == "op/a"
    assert choose(registry("a", "b"), wishes, phase="decode").impl == "op/b"


def test_what_cannot_be_run_here_is_said():
    found = choose(registry("a"), [prefer("a")], prove=lambda s, k, p: None)
    assert (found.impl, found.verified) == ("op/a", None)
    assert "not verified" in found.reason


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (site(status="unknown", op=None, binding=None, reason="no op has this structure: exp"), "unknown: no op"),
        (site(status="variant", binding=None, differs=("it is scaled",)), "variant: it is scaled"),
        (site(binding=None, reason="top 2 of 8"), "top 2 of 8; nothing can be bound"),
    ],
)
def test_sites_that_only_upstream_can_run(at, words):
    found = choose(registry("a"), [prefer("a"), parse_set("op=a")], at=at)
    assert found.impl == "upstream"
    assert words in found.reason
    if at.op:
        with pytest.raises(Refused):
            choose(registry("a"), [parse_set("a.*:op=a")], at=at)


def test_mixers_get_the_best_tier_that_holds_them():
    def mixer(*tiers):
        return site(mixer=Mixer(kind="attention", layers=(0,), state="kv", tiers=tiers, reason="plain"))

    assert choose(registry(), at=mixer("isolate", "gather")).tier == "gather"
    assert choose(registry(), at=mixer("isolate")).tier == "isolate"
    assert choose(registry(), at=site()).tier is None
