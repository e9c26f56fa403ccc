"""The registry: discovery in folders, refusals recorded, selection explained."""

import importlib
import sys

import pytest

from dz.core.device import Device
from dz.core.kernel import YES, Kernel, Requires, Support
from dz.core.op import Op, Tolerance
from dz.core.registry import Registry
from dz.errors import Refused, UsageError

CPU = Device(kind="cpu", name="host")
HOPPER = Device(kind="cuda", name="x", arch=90)
KERNEL = """
from dz.core.kernel import Kernel, Requires
KERNEL = Kernel(op="{op}", technique="{technique}", summary="made up", run=lambda x: x, requires=Requires())
"""


def op(name: str = "double") -> Op:
    return Op(name=name, summary="twice", reference=lambda x: x + x, tolerance={"float32": Tolerance(0, 0)})


def kernel(technique: str, supports=lambda args: YES, **needs) -> Kernel:
    return Kernel(
        op="double", technique=technique, summary="", run=lambda x: 2 * x, requires=Requires(**needs), supports=supports
    )


def registry(*kernels: Kernel) -> Registry:
    out = Registry()
    out.add_op(op())
    for k in kernels:
        out.add_kernel(k)
    return out


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A $DZ_PATH folder; `write(path, text)` puts a kernel file there. dz.kernels is made anew."""
    monkeypatch.setenv("DZ_PATH", str(tmp_path))

    def forget():
        for name in [m for m in sys.modules if m.partition(".")[0] == "dz" and m.startswith("dz.kernels")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def write(path: str, text: str) -> None:
        file = tmp_path / "kernels" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    forget()
    yield write
    monkeypatch.undo()
    forget()
    importlib.import_module("dz.kernels")


def test_discovers_what_ships():
    found = Registry.discover()
    assert {"rms_norm", "linear", "attention"} <= set(found.ops)
    assert {"rms_norm/torch", "rms_norm/triton"} <= set(found.kernels)
    assert all(name == o.name for name, o in found.ops.items())
    assert all(key == k.key and k.op in found.ops for key, k in found.kernels.items())


def test_outside_folders_add_techniques(outside):
    outside("rms_norm/mine.py", KERNEL.format(op="rms_norm", technique="mine"))
    outside("layer_norm/mine.py", KERNEL.format(op="layer_norm", technique="mine"))
    found = Registry.discover()
    assert {"rms_norm/mine", "layer_norm/mine", "rms_norm/torch", "rms_norm/triton"} <= set(found.kernels)
    assert not found.unavailable


def test_what_cannot_be_used_is_recorded_with_its_reason(outside):
    outside("rms_norm/broken.py", "import no_such_library")
    outside("rms_norm/crash.py", "1 / 0")
    outside("rms_norm/empty.py", "")
    outside("rms_norm/liar.py", KERNEL.format(op="rms_norm", technique="torch"))
    outside("no_op/mine.py", KERNEL.format(op="no_op", technique="mine"))
    outside("badly/__init__.py", "raise RuntimeError('at import')")
    outside("badly/mine.py", "")
    found = Registry.discover()
    assert found.unavailable == {
        "rms_norm/broken": "ModuleNotFoundError: No module named 'no_such_library'",
        "rms_norm/crash": "ZeroDivisionError: division by zero",
        "rms_norm/empty": "the file defines no KERNEL",
        "rms_norm/liar": "the file calls itself rms_norm/torch",
        "no_op/mine": "there is no op 'no_op'",
        "badly/mine": "RuntimeError: at import",
    }
    assert "rms_norm/torch" in found.kernels


def test_twins_in_two_folders_are_refused(outside, tmp_path):
    outside("rms_norm/torch.py", KERNEL.format(op="rms_norm", technique="torch"))
    with pytest.raises(Refused, match="'rms_norm/torch' is registered twice") as e:
        Registry.discover()
    assert str(tmp_path / "kernels/rms_norm/torch.py") in e.value.why


def test_duplicates_are_refused():
    found = registry(kernel("a"))
    with pytest.raises(Refused, match="'double/a'"):
        found.add_kernel(kernel("a"))
    with pytest.raises(Refused, match="'double'"):
        found.add_op(op())


def test_lookup():
    found = registry(kernel("torch"))
    found.unavailable["double/lost"] = "ImportError: gone"
    assert found.op("double").name == "double" and found.kernel("double/torch").technique == "torch"
    with pytest.raises(UsageError) as e:
        found.op("duoble")
    assert "did you mean 'double'?" in e.value.why
    with pytest.raises(UsageError) as e:
        found.kernel("double/torhc")
    assert "did you mean 'double/torch'?" in e.value.why
    with pytest.raises(UsageError) as e:
        found.kernel("double/lost")
    assert e.value.why == "ImportError: gone"


def test_the_only_eligible_one_is_taken_and_the_rest_explained():
    found = registry(kernel("gpu", device=("cuda",)), kernel("half", dtypes=("float16",)), kernel("any"))
    found.unavailable["double/lost"] = "ImportError: gone"
    got = found.select("double", CPU, "float32", "decode")
    assert got.kernel.technique == "any" and got.reason == "only eligible on cpu"
    assert {r.impl: r.reason for r in got.rejected} == {
        "double/gpu": "needs cuda, the device is cpu",
        "double/half": "takes float16, not float32",
        "double/lost": "unavailable: ImportError: gone",
    }


def test_ambiguity_is_refused_and_a_preference_decides():
    found = registry(kernel("a"), kernel("b"))
    with pytest.raises(Refused) as e:
        found.select("double", CPU, "float32", "prefill")
    assert "double/a, double/b" in e.value.why and e.value.next == "name one: --set double=double/a"
    for want in ("b", "double/b"):
        got = found.select("double", CPU, "float32", "prefill", prefer=[want])
        assert got.kernel.technique == "b" and [r.impl for r in got.rejected] == ["double/a"]
    got = found.select("double", CPU, "float32", "prefill", prefer=["none", "b", "a"])
    assert got.kernel.technique == "b"


def test_a_preference_cannot_force_what_does_not_fit():
    found = registry(kernel("gpu", device=("cuda",)), kernel("any"))
    got = found.select("double", CPU, "float32", "decode", prefer=["gpu", "any"])
    assert got.kernel.technique == "any" and got.rejected[0].impl == "double/gpu"


def test_arguments_are_asked():
    picky = kernel("picky", supports=lambda args: Support(args["n"] % 2 == 0, "n is odd"))
    found = registry(picky)
    assert found.select("double", CPU, "float32", "decode", args={"n": 2}).kernel is picky
    got = found.select("double", CPU, "float32", "decode", args={"n": 3})
    assert got.kernel is None and got.reason == "no eligible kernel" and got.rejected[0].reason == "n is odd"


def test_nothing_registered():
    assert registry().select("double", CPU, "float32", "decode").reason == "no kernel is registered"


@pytest.mark.parametrize(
    ("needs", "device", "ok"),
    [
        ({}, CPU, True),
        ({"arch": (80, None)}, HOPPER, True),
        ({"arch": (None, 89)}, HOPPER, False),
        ({"arch": (90, 90)}, HOPPER, True),
        ({"arch": (100, None)}, HOPPER, False),
        ({"arch": (80, None)}, CPU, True),
        ({"device": ("cuda", "rocm")}, HOPPER, True),
        ({"device": ("rocm",)}, HOPPER, False),
        ({"phases": ("prefill",)}, CPU, False),
        ({"dtypes": ("bfloat16",)}, CPU, False),
        ({"dtypes": ("float32",)}, CPU, True),
    ],
)
def test_requirements(needs, device, ok):
    answer = Requires(**needs).check(device, "float32", "decode")
    assert answer.ok is ok and bool(answer.reason) is not ok
