"""The comparison: what passes, what never does, what it reports."""

import math

import pytest
import torch

from dz.core.op import Tolerance
from dz.verify.errors import compare

TOL = Tolerance(1e-3, 1e-2)
NAN, INF = float("nan"), float("inf")


def test_within_and_beyond():
    want = torch.tensor([[1.0, 100.0], [0.0, -10.0]])
    assert compare(want + torch.tensor([[0.01, 1.0], [0.0009, -0.1]]), want, TOL).ok
    report = compare(want + torch.tensor([[0.0, 0.5], [0.0, 0.2]]), want, TOL)
    assert not report.ok and report.worst == "[1, 1]" and report.n == 4
    assert math.isclose(report.max_abs, 0.5, rel_tol=1e-6) and math.isclose(report.max_rel, 0.02, rel_tol=1e-5)
    assert "1 of 4" in report.reason


@pytest.mark.parametrize(
    ("got", "want"), [([NAN], [1.0]), ([NAN], [NAN]), ([1.0], [NAN]), ([INF], [1.0]), ([1.0], [INF])]
)
def test_nan_never_passes_and_infinity_only_itself(got, want):
    report = compare(torch.tensor(got), torch.tensor(want), Tolerance(INF if got == want else 1e9, 1e9))
    assert not report.ok and report.max_abs == INF


def test_equal_infinities_pass_and_leave_others_judged():
    want = torch.tensor([INF, -INF, 1.0])
    assert compare(want.clone(), want, TOL).ok
    assert compare(want + torch.tensor([0, 0, 1.0]), want, TOL).worst == "[2]"
    assert not compare(-want, want, TOL).ok


def test_structure_shape_and_kind():
    x = torch.ones(2, 3)
    assert compare((x, [x, None]), (x, (x, None)), TOL).n == 12
    for got, want in [((x,), (x, x)), (x, (x,)), (None, x), (x, None), (x[:1], x), (x.long(), x), (x.T, x)]:
        report = compare(got, want, TOL)
        assert not report.ok and report.reason and report.max_abs == INF
    assert compare((x, x + 1), (x, x), TOL).worst == "[1][0, 0]"


def test_whole_numbers_must_be_equal():
    assert compare(torch.tensor([3, 4]), torch.tensor([3, 4], dtype=torch.int32), Tolerance(5, 5)).ok
    assert not compare(torch.tensor([3, 5]), torch.tensor([3, 4]), Tolerance(5, 5)).ok
    assert not compare(torch.tensor([True]), torch.tensor([False]), Tolerance(5, 5)).ok


def test_exact_means_bits_of_zero_too():
    zero = torch.zeros(2)
    assert compare(zero, zero.double(), Tolerance(0, 0)).ok
    assert not compare(-zero, zero, Tolerance(0, 0)).ok
    assert compare(-zero, zero, TOL).ok
    assert not compare(torch.tensor([1.0 + 2**-23]), torch.tensor([1.0]), Tolerance(0, 0)).ok


def test_narrow_dtypes_and_empty():
    x = torch.tensor([0.5, -448.0])
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert compare(x.to(dtype), x.double(), Tolerance(0, 0)).ok
    assert compare(torch.ones(0, 3), torch.ones(0, 3), Tolerance(0, 0)) == compare((), (), TOL)
