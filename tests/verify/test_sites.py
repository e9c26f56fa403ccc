"""A kernel that is wrong in its eps, its 1 + w or its tail does not get past the verification; a right one does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dz.core.inventory import Binding, Site, SiteView
from dz.core.kernel import Kernel, Requires, Support
from dz.core.registry import Registry
from dz.verify.sites import verify
from dz.verify.subject import reader, subject


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


class Norm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width, device="meta")), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Ffn(nn.Module):
    def __init__(self, width=20, inner=30):
        super().__init__()
        with torch.device("meta"):
            self.a, self.b = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
            self.c = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.c(F.silu(self.a(x)) * self.b(x))


def site_of(registry, op, target, kind="module"):
    match = registry.op(op).recognise(SiteView(kind=kind, fqn="m", target=target, source="", config=None))
    assert match.status == "known"
    return Site(
        id="m",
        kind=kind,
        cls="X",
        where="here",
        members=("m",),
        status="known",
        op=op,
        binding=match.binding,
        traits=match.traits,
    )


def random_weights(name, shape):
    return None


def subject_of(registry, op, target, dtype=torch.float32, read=random_weights, kind="module"):
    return subject(site_of(registry, op, target, kind), target, read, dtype=dtype, device="cpu")


def norm_kernel(run, supports=lambda args: Support(True)):
    return Kernel(op="rms_norm", technique="tested", summary="", run=run, requires=Requires(), supports=supports)


def right(x, weight=None, *, eps=1e-6, offset=0.0, cast_first=True, residual=None):
    full = x.float()
    out = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
    return (out * (weight.float() + offset)).to(x.dtype)


def wrong_eps(x, weight=None, *, eps=1e-6, **rest):
    return right(x, weight, eps=1e-6, **rest)


def wrong_offset(x, weight=None, *, offset=0.0, **rest):
    return right(x, weight, offset=0.0, **rest)


def ragged_tail(x, weight=None, **rest):
    out = right(x, weight, **rest)
    block = 8
    tail = x.shape[-1] % block
    if tail:  # a block too few: the last columns stay as they came
        out[..., -tail:] = x[..., -tail:]
    return out


def ragged_rows(x, weight=None, **rest):
    out = right(x, weight, **rest)
    rows = out.reshape(-1, out.shape[-1])
    if len(rows) > 4 and len(rows) % 4:
        rows = torch.cat((rows[: len(rows) // 4 * 4], rows[: len(rows) % 4]))
    return rows.reshape(out.shape)


def changes_its_input(x, weight=None, **rest):
    out = right(x, weight, **rest)
    x.mul_(1.5)
    return out


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_kernel_is_verified(registry, phase, dtype):
    target = subject_of(registry, "rms_norm", Norm(36), getattr(torch, dtype))
    found = verify(registry.op("rms_norm"), norm_kernel(right), target, dtype=dtype, device="cpu", phase=phase)
    assert found.ok, found.reason
    assert found.verified.level == "op"
    assert found.verified.cases == 9
    assert 0 < found.verified.max_err < 1e-2
    assert found.verified.data == "random weights"


@pytest.mark.parametrize(
    "run", [wrong_eps, wrong_offset, ragged_tail, ragged_rows, changes_its_input], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_broken_kernel_is_rejected_with_numbers(registry, run, phase):
    target = subject_of(registry, "rms_norm", Norm(36))
    found = verify(registry.op("rms_norm"), norm_kernel(run), target, dtype="float32", device="cpu", phase=phase)
    assert not found.ok
    assert found.verified is None
    assert "failed verification" in found.reason
    if run is not changes_its_input:
        assert "beyond" in found.reason


def test_the_reference_itself_is_held_against_upstream(registry):
    """A binding with another eps than the module has must not pass: recognition is proved by numbers too."""
    op, target = registry.op("rms_norm"), subject_of(registry, "rms_norm", Norm(36, eps=1e-2))
    assert verify(op, None, target, dtype="float32", device="cpu", phase="decode").ok
    args = [replace(a, source="constant", value=1e-5) if a.name == "eps" else a for a in target.site.binding.args]
    wrong = replace(target.site, binding=Binding(args=tuple(args)))
    moved = replace(target, site=wrong)
    assert not verify(op, None, moved, dtype="float32", device="cpu", phase="decode").ok


def test_a_refusal_is_no_verification(registry):
    kernel = norm_kernel(right, supports=lambda args: Support(False, "offset is not mine"))
    found = verify(
        registry.op("rms_norm"),
        kernel,
        subject_of(registry, "rms_norm", Norm(36)),
        dtype="float32",
        device="cpu",
        phase="prefill",
    )
    assert not found.ok
    assert "offset is not mine" in found.reason


def test_real_weights_are_read_and_said(registry):
    held = {"model.norm.scale": torch.full((36,), 0.25)}
    read = reader({"model.norm.scale": "m.weight"}, "m", held.__getitem__)
    target = subject_of(registry, "rms_norm", Norm(36), read=read)
    assert target.data == "real weights"
    assert torch.equal(target.target.weight, held["model.norm.scale"])


def test_merged_or_reshaped_tensors_are_not_taken_for_real(registry):
    held = {"a": torch.ones(36), "b": torch.ones(36), "c": torch.ones(35)}
    for placed in ({"a": "m.weight", "b": "m.weight"}, {"c": "m.weight"}):
        assert (
            subject_of(registry, "rms_norm", Norm(36), read=reader(placed, "m", held.__getitem__)).data
            == "random weights"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_feed_forward_is_verified_with_its_projections_round_the_op(registry, dtype):
    target = subject_of(registry, "gated_activation", Ffn(), getattr(torch, dtype))
    kernel = registry.kernel("gated_activation/torch")
    found = verify(registry.op("gated_activation"), kernel, target, dtype=dtype, device="cpu", phase="prefill")
    assert found.ok, found.reason

    def gelu(gate, up=None, **rest):
        return F.gelu(gate) * up

    wrong = Kernel(op="gated_activation", technique="wrong", summary="", run=gelu, requires=Requires())
    assert not verify(registry.op("gated_activation"), wrong, target, dtype=dtype, device="cpu", phase="prefill").ok


def test_an_op_without_examples_cannot_be_verified(registry):
    linear = nn.Linear(4, 4)
    site = site_of(registry, "linear", linear)
    found = verify(
        registry.op("linear"),
        None,
        subject(site, linear, random_weights, dtype=torch.float32, device="cpu"),
        dtype="float32",
        device="cpu",
        phase="prefill",
    )
    assert not found.ok
    assert "no verification inputs" in found.reason
