"""The fold to FP8: exact up to a spread of 14, measured above it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.errors import Refused
from dz.ops.mxfp4_to_fp8 import inputs, reference, require_exact
from dz.ops.mxfp4_unpack import reference as unpack


def fold(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(value after the fold, value before it, spread), float64."""
    codes, scale, spread = reference(packed, scales)
    return codes.double() * scale.double()[..., None], unpack(packed, scales, dtype="float64"), spread


def every_code(exponents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.tensor(list(bytes.fromhex("1032547698badcfe" * 2)), dtype=torch.uint8)
    return row.repeat(1, len(exponents)), torch.tensor([exponents], dtype=torch.uint8)


@pytest.mark.parametrize("base", [14, 100, 127, 254])
@pytest.mark.parametrize("gap", range(15))
def test_exact_for_every_code_up_to_14(base, gap):
    got, want, spread = fold(*every_code([base, base - gap]))
    assert torch.equal(got, want) and spread.tolist() == [gap]
    require_exact(spread, "w")


@pytest.mark.parametrize(
    ("gap", "lost"), [(15, {0.5, 1.5}), (17, {0.5, 1, 1.5, 2, 3, 6}), (20, {0.5, 1, 1.5, 2, 3, 4, 6})]
)
def test_what_is_lost_beyond_14(gap, lost):
    got, want, spread = fold(*every_code([127, 127 - gap]))
    wrong = {abs(v) * 2.0**gap for v in want[0, 32:][got[0, 32:] != want[0, 32:]].tolist()}
    assert wrong == lost and torch.equal(got[0, :32], want[0, :32])
    assert (got - want).abs().max() <= 2.0**-10 * 2.0**-6
    with pytest.raises(Refused, match="w does not fold") as e:
        require_exact(spread, "w")
    assert "1 of 1 rows" in e.value.why


def test_zero_blocks_do_not_count():
    cases = {c.id: c.args for c in inputs("", "cpu", 0)}
    codes, scale, spread = reference(**cases["zero_blocks_zero_row_extremes"])
    assert spread.tolist()[:2] == [0, 0] and scale[1] == 1 and scale[0] == 2.0 ** (120 - 133)
    assert not codes[1].float().any() and codes[0, :32:2].float().signbit().logical_not().all()


def test_byte_255_is_nan_in_its_block_alone():
    codes, scale, spread = reference(*every_code([120, 255, 121]))
    assert (codes[0, 32:64].view(torch.uint8) == 0x7F).all() and codes.float()[0, :32].isfinite().all()
    assert scale[0] == 2.0 ** (121 - 133) and spread.tolist() == [1]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 240), st.integers(0, 14), st.integers(0, 2**31))
def test_random_rows_within_14_are_exact_in_both_layouts(rows, blocks, low, span, seed):
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, blocks * 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(low, low + span + 1, (rows, blocks), generator=g).to(torch.uint8)
    got, want, spread = fold(packed, scales)
    assert torch.equal(got, want) and int(spread.max()) <= 14
    stacked = reference(packed.view(rows, blocks, 16), scales)
    assert torch.equal(stacked[0].view(torch.uint8), reference(packed, scales)[0].view(torch.uint8))
