"""Values of each family against numbers written by hand from its definition."""

import pytest
import torch

from dz.weights.families import awq, fp8, gptq, integers, mxfp8, nvfp4
from dz.weights.families.base import Form

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def f8(*values):
    return torch.tensor(values, dtype=torch.float32).to(torch.float8_e4m3fn)


def test_mxfp8_rows_of_32():
    values = f8(*[1.0] * 32, *[-1.5] * 32).reshape(1, 64)
    scales = torch.tensor([[126, 130]], dtype=torch.uint8)
    want = [0.5] * 32 + [-12.0] * 32
    assert mxfp8.decode(values, scales).tolist() == [want]
    assert mxfp8.decode(values, scales.view(torch.float8_e8m0fnu)).tolist() == [want]


@pytest.mark.parametrize("convention", [nvfp4.MULTIPLIES, nvfp4.DIVIDES])
def test_nvfp4_both_conventions(convention):
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)  # low nibble first
    form = Form(layout=convention, shape=(1, 16), group=(16,))
    got = nvfp4.decode(codes, f8(2.0).reshape(1, 1), torch.tensor(4.0), form)
    factor = 8.0 if convention == nvfp4.MULTIPLIES else 0.5
    assert got.tolist() == [[v * factor for v in E2M1]]


def test_fp8_of_every_extent():
    values = f8(*[1.0] * 12).reshape(3, 4)
    one = lambda layout, **more: Form(layout=layout, shape=(3, 4), **more)  # noqa: E731
    assert fp8.decode(values, torch.tensor([2.0]), one(fp8.TENSOR)).unique().tolist() == [2.0]
    rows = torch.tensor([[1.0], [2.0], [4.0]])
    for s in (rows, rows[:, 0]):
        assert fp8.decode(values, s, one(fp8.CHANNEL)).tolist() == [[1.0] * 4, [2.0] * 4, [4.0] * 4]
    blocks = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    got = fp8.decode(values, blocks, one(fp8.BLOCKS, group=(2, 3)))
    assert got.tolist() == [[1, 1, 1, 2], [1, 1, 1, 2], [4, 4, 4, 8]]


def test_int_words():
    # 0x..10: nibbles 0..7, then 8..15 (low first); the offset is 8
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - 2**32]], dtype=torch.int32)
    got = integers.decode(words, torch.tensor([[1.0, 10.0]]), bits=4, width=16)
    assert got.tolist() == [[*range(-8, 0), *(10.0 * v for v in range(8))]]
    bytes_ = torch.tensor([[0x7F800001]], dtype=torch.int32)
    assert integers.decode(bytes_, torch.ones(1, 1), bits=8, width=4).tolist() == [[-127.0, -128.0, 0.0, -1.0]]


def test_awq_order_of_the_nibbles():
    # output j of eight lies in nibble ORDER[j]: outputs 0..7 hold codes 0 2 4 6 1 3 5 7 read from the low nibble up
    words = torch.tensor([[0x75316420]], dtype=torch.int32)
    zeros = torch.tensor([[0x00000000]], dtype=torch.int32)
    got = awq.decode(words, zeros, torch.ones(1, 8))
    assert got[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    shifted = awq.decode(words, torch.tensor([[0x11111111]], dtype=torch.int32), torch.full((1, 8), 2.0))
    assert shifted[:, 0].tolist() == [-2, 0, 2, 4, 6, 8, 10, 12]


def test_gptq_groups_by_index():
    words = torch.tensor([[0x76543210]], dtype=torch.int32)  # one output, eight inputs
    words = words.repeat(1, 8)
    zeros = torch.tensor([[0], [0x11111111]], dtype=torch.int32)  # stored zero z means z + 1
    scales = torch.stack([torch.ones(8), torch.full((8,), 10.0)])
    index = torch.tensor([0, 1] * 4)
    got = gptq.decode(words, zeros, scales, index, bits=4)
    assert got[0].tolist() == [-1, -10, 1, 10, 3, 30, 5, 50] and got.shape == (8, 8)
