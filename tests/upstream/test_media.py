"""Tensors to bytes and back."""

import numpy as np
import pytest
import torch

from dz.core.messages import Blob
from dz.errors import Refused
from dz.upstream.media import from_blob, pack, to_blob, unpack


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 5)])
def test_every_dtype_and_shape_survives(dtype, shape):
    tensor = (torch.arange(max(1, int(np.prod(shape))))[: int(np.prod(shape))] % 7).reshape(shape).to(dtype)
    back = from_blob(to_blob(tensor))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_strided_views_come_in_their_own_order():
    tensor = torch.arange(12.0).reshape(3, 4).t()[1:]
    assert torch.equal(from_blob(to_blob(tensor)), tensor)


def test_the_copy_can_be_written():
    back = from_blob(to_blob(torch.zeros(3)))
    back += 1
    assert back.tolist() == [1, 1, 1]


def test_names_and_ragged_lists_survive():
    media = {
        "pixel_values": torch.rand(2, 3),
        "ragged": [torch.rand(2, 3), torch.rand(4, 3)],
        "single": [torch.ones(1)],
        "nested": [[torch.zeros(1), torch.ones(2)], [torch.zeros(3)]],
        "sizes": [(3, 4), (5, 6)],
        "array": np.arange(6).reshape(2, 3),
        "ragged_numbers": [[1, 2], [3]],
        "count": 3,
        "nothing": None,
        "many": [torch.full((1,), i) for i in range(12)],
    }
    back = unpack(pack(media))
    assert set(back) == set(media) - {"nothing"}
    assert torch.equal(back["pixel_values"], media["pixel_values"])
    assert [t.shape for t in back["ragged"]] == [(2, 3), (4, 3)]
    assert torch.equal(back["ragged"][1], media["ragged"][1])
    assert isinstance(back["single"], list) and len(back["single"]) == 1
    assert [[t.tolist() for t in row] for row in back["nested"]] == [[[0], [1, 1]], [[0, 0, 0]]]
    assert back["sizes"].tolist() == [[3, 4], [5, 6]]
    assert back["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [t.tolist() for t in back["ragged_numbers"]] == [[1, 2], [3]]
    assert back["count"].item() == 3
    assert [t.item() for t in back["many"]] == list(range(12))  # by number, not by name


def test_what_cannot_be_sent_is_named():
    with pytest.raises(Refused, match="captions"):
        pack({"captions": ["a", "b"]})


@pytest.mark.parametrize(
    "blob", [Blob("float32", (2,), b"1234"), Blob("nothing", (1,), b"1234"), Blob("nn", (1,), b"1")]
)
def test_bytes_that_do_not_fit_are_refused(blob):
    with pytest.raises(Refused):
        from_blob(blob)
