"""Which way a layer of MXFP4 experts goes, by the tables measured on a device."""

import pytest

from dz.errors import EnvironmentFailure, UsageError
from dz.ops.expert_cost import Costs, at, choose, costs_of

LINE = [(1.0, 2.0), (3.0, 4.0), (4.0, 8.0)]
COSTS = Costs(registers=[(1.0, 0.2), (10.0, 0.3), (100.0, 1.2)], folded=[(50.0, 0.3), (250.0, 0.7)], fold=0.4)
WEIGHTS = 22_000_000


@pytest.mark.parametrize(("rows", "want"), [(0.5, 2.0), (1.0, 2.0), (2.0, 3.0), (3.5, 6.0), (4.0, 8.0), (5.0, 12.0)])
def test_a_table_is_read_between_and_beyond_its_points(rows, want):
    assert at(LINE, rows) == pytest.approx(want)
    assert at(LINE[:1], rows) == 2.0


def test_the_cheaper_way_is_taken_and_said():
    few = choose(rows=56, hit=56, weights=WEIGHTS, costs=COSTS)
    assert few.way == "registers" and few.registers_us == pytest.approx(56 * 22 * 0.2)
    many = choose(rows=56 * 250, hit=56, weights=WEIGHTS, costs=COSTS)
    assert many.way == "folded" and many.folded_us == pytest.approx(56 * 22 * 1.1)
    assert "250 rows an expert" in many.reason and "counted" in many.reason


def test_a_hidden_conversion_is_worth_it_earlier():
    def first_folded(*, hidden: bool) -> int:
        return next(
            each
            for each in range(1, 1000)
            if choose(rows=each * 8, hit=8, weights=WEIGHTS, costs=COSTS, hidden=hidden).way == "folded"
        )

    assert 1 < first_folded(hidden=True) < first_folded(hidden=False) < 1000


def test_few_experts_with_many_rows_fold_before_many_with_few():
    assert choose(rows=2000, hit=8, weights=WEIGHTS, costs=COSTS).way == "folded"
    assert choose(rows=2000, hit=56, weights=WEIGHTS, costs=COSTS).way == "registers"


def test_no_rows_cost_nothing():
    assert choose(rows=0, hit=0, weights=WEIGHTS, costs=COSTS).folded_us == 0


@pytest.mark.parametrize(("rows", "hit", "weights"), [(-1, 0, 5), (3, 4, 5), (3, -1, 5), (3, 0, 5), (3, 1, 0)])
def test_what_cannot_be_is_an_error(rows, hit, weights):
    with pytest.raises(UsageError):
        choose(rows=rows, hit=hit, weights=weights, costs=COSTS)


def test_the_shipped_table_decides_both_ways():
    costs = costs_of("NVIDIA H200")
    for points in (costs.registers, costs.folded):
        assert list(points) == sorted(points) and all(ps > 0 for _, ps in points)
    assert choose(rows=256, hit=56, weights=WEIGHTS, costs=costs).way == "registers"
    assert choose(rows=32768, hit=56, weights=WEIGHTS, costs=costs).way == "folded"


def test_a_device_without_a_table_is_named():
    with pytest.raises(EnvironmentFailure, match="abacus"):
        costs_of("abacus")
