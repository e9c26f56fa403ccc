"""The mends of tests/kernels/conftest.py: without them a right kernel would be judged wrong."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="not in Triton's interpreter")


@triton.jit
def _round(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(tl.bfloat16))


@triton.jit
def _round_e4m3(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(tl.float8e4nv))


@triton.jit
def _widen(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(tl.float32))


@triton.jit
def _dot(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_fp32_to_bfloat16_rounds_to_nearest_even():
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    x[:6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1.9999, 3.4e38, float("inf"), 1e-40])
    out = torch.empty(1024, dtype=torch.bfloat16)
    _round[(1,)](x, out, N=1024)
    assert torch.equal(out, x.bfloat16())


def test_subnormal_bfloat16_keeps_its_value():
    x = torch.arange(256, dtype=torch.int16).view(torch.bfloat16)
    out = torch.empty(256)
    _widen[(1,)](x, out, N=256)
    assert torch.equal(out, x.float()) and out[1] > 0


def test_fp32_to_e4m3_rounds_to_nearest_even():
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * 2
    x[:4] = torch.tensor([1.9999, -63.0, 2**-10, 448.0])
    out = torch.empty(1024, dtype=torch.float8_e4m3fn)
    _round_e4m3[(1,)](x, out, N=1024)
    assert torch.equal(out.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_bfloat16_dot_multiplies_values():
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    out = torch.empty(16, 16)
    _dot[(1,)](a, b, out, N=16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
