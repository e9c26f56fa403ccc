"""The contract: one test for every kernel of the registry, and the proof that it can fail."""

import sys

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from dz.core.kernel import YES, Kernel, Requires, Support
from dz.core.op import Case, Op, Tolerance
from dz.core.registry import Registry
from dz.ops.rms_norm import OP as RMS_NORM
from dz.ops.rms_norm import reference as rms_norm
from dz.verify.contract import check_case

REGISTRY = Registry.discover()
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]
PAIRS = [
    pytest.param(kernel, dtype, id=f"{key}-{dtype}")
    for key, kernel in sorted(REGISTRY.kernels.items())
    for dtype in REGISTRY.ops[kernel.op].tolerance
    if not kernel.requires.dtypes or dtype in kernel.requires.dtypes
]


def device_for(kernel: Kernel, where: str) -> str:
    """The torch device on which to run the kernel, or skip with the reason."""
    if where == "accelerator":
        if not torch.accelerator.is_available():
            pytest.skip("no accelerator here")
        kind = torch.accelerator.current_accelerator().type
        if kernel.requires.device and not {kind, "rocm" if torch.version.hip else kind} & set(kernel.requires.device):
            pytest.skip(f"needs {' or '.join(kernel.requires.device)}")
        return kind
    if not kernel.requires.device or "cpu" in kernel.requires.device:
        return "cpu"
    held = vars(sys.modules[kernel.run.__module__]).values()
    if kernel.interpreter:
        pytest.skip(f"not in Triton's interpreter: {kernel.interpreter}")
    if any(isinstance(v, JITFunction) for v in held) and not torch.accelerator.is_available():
        pytest.fail("Triton was imported before TRITON_INTERPRET was set; import no kernel before tests/conftest.py")
    if not any(isinstance(v, InterpretedFunction) for v in held):
        pytest.skip(
            f"needs {' or '.join(kernel.requires.device)}, and it is not Triton's interpreter that could stand in"
        )
    return "cpu"


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("kernel", "dtype"), PAIRS)
def test_kernel_meets_its_op(kernel: Kernel, dtype: str, where: str):
    op = REGISTRY.ops[kernel.op]
    device = device_for(kernel, where)
    outcomes = [check_case(op, kernel, case, dtype) for case in op.inputs(dtype, device, seed=0)]
    wrong = [f"{o.case}: {'; '.join(o.faults)}" for o in outcomes if not o.ok]
    assert not wrong, f"{kernel.key} {dtype} on {device}:\n" + "\n".join(wrong)
    assert any(not o.refused for o in outcomes), f"{kernel.key} refuses every case: {outcomes[0].refused}"


def test_every_kernel_file_imports():
    assert not REGISTRY.unavailable
    assert {k.op for k in REGISTRY.kernels.values()} >= {"rms_norm", "gated_activation", "mxfp4_unpack"}


@pytest.mark.parametrize("op", REGISTRY.ops.values(), ids=lambda op: op.name)
def test_references_meet_their_own_truth(op: Op):
    """A reference in its storage dtype, taken as a kernel, is within the tolerance that kernels are given."""
    itself = Kernel(op=op.name, technique="reference", summary="", run=op.reference, requires=Requires())
    for dtype in op.tolerance:
        outcomes = [check_case(op, itself, case, dtype) for case in op.inputs(dtype, "cpu", seed=1)]
        assert [o for o in outcomes if not o.ok] == []
        assert len({o.case for o in outcomes}) == len(outcomes) >= 4


def wrong_eps(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    return rms_norm(x, weight, eps=1e-6, offset=offset, cast_first=cast_first, residual=residual)


def wrong_offset(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    return rms_norm(x, weight, eps=eps, offset=1.0 - offset, cast_first=cast_first, residual=residual)


def ragged_tail_lost(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    out = torch.empty_like(x)
    whole = x.shape[-1] // 16 * 16
    out[..., :whole] = rms_norm(x, weight, eps=eps, offset=offset, cast_first=cast_first)[..., :whole]
    return out


def padded_mean(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    """Divides by the padded width: right for powers of two only."""
    width = triton.next_power_of_2(x.shape[-1])
    full = x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) / width + eps)
    return (full * (weight.float() + offset)).to(x.dtype)


def reads_past_the_end(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    wider = x.as_strided((*x.shape[:-1], x.shape[-1] + 1), x.stride())
    scale = torch.rsqrt(wider.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * scale * weight.float()).to(x.dtype)


def writes_past_the_end(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    out = torch.empty_like(x)
    out.as_strided((out.numel() + 1,), (1,)).fill_(0)
    return out.copy_(rms_norm(x, weight, eps=eps))


def in_place(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    return x.copy_(rms_norm(x, weight, eps=eps))


def residual_ignored(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    return rms_norm(x, weight, eps=eps, offset=offset, cast_first=cast_first)


def other_dtype(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    return rms_norm(x.double(), weight.double(), eps=eps)


def noisy(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    return rms_norm(x, weight, eps=eps) * (1 + 1e-6 * torch.rand(()))


BROKEN = [
    (wrong_eps, "beyond"),
    (wrong_offset, "beyond"),
    (ragged_tail_lost, "NaN"),
    (padded_mean, "beyond"),
    (reads_past_the_end, "NaN"),
    (writes_past_the_end, "wrote outside a tensor"),
    (in_place, "x was changed"),
    (residual_ignored, "2 results are wanted"),
    (other_dtype, "the reference gives torch.float32"),
    (noisy, "two runs differ"),
]


def plain(case: Case) -> bool:
    return case.args["x"].numel() > 0 and case.args.get("weight") is not None


@pytest.mark.parametrize(("run", "words"), BROKEN, ids=[run.__name__ for run, _ in BROKEN])
def test_broken_kernels_are_rejected(run, words: str):
    registry = Registry()
    registry.add_op(RMS_NORM)
    registry.add_kernel(Kernel(op="rms_norm", technique="broken", summary="", run=run, requires=Requires()))
    kernel = registry.kernel("rms_norm/broken")
    cases = [c for c in RMS_NORM.inputs("float32", "cpu", seed=0) if plain(c)]
    faults = [f for c in cases for f in check_case(RMS_NORM, kernel, c, "float32").faults]
    assert any(words in f for f in faults), faults


def test_a_right_kernel_passes_and_a_silent_refusal_does_not():
    right = Kernel(op="rms_norm", technique="right", summary="", run=rms_norm, requires=Requires())
    mute = Kernel(
        op="rms_norm",
        technique="mute",
        summary="",
        run=rms_norm,
        requires=Requires(),
        supports=lambda args: Support(False),
    )
    case = next(RMS_NORM.inputs("float32", "cpu", seed=0))
    assert check_case(RMS_NORM, right, case, "float32").ok
    assert check_case(RMS_NORM, mute, case, "float32").faults == ("refuses without a reason",)
    assert right.supports({}) is YES


def test_a_tolerance_of_nothing_is_bit_exact():
    right = Kernel(op="rms_norm", technique="right", summary="", run=rms_norm, requires=Requires())
    unsigned = Kernel(
        op="rms_norm", technique="x", summary="", run=lambda **a: rms_norm(**a) + 0.0, requires=Requires()
    )
    case = Case("zeros", {"x": -torch.zeros(1, 4), "weight": torch.ones(4)})
    exact = Tolerance(0, 0)
    assert check_case(RMS_NORM, right, case, "float32", tol=exact).ok
    assert not check_case(RMS_NORM, unsigned, case, "float32", tol=exact).ok
