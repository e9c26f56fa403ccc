"""Random tensors in the shape of a checkpoint: repeatable, finite, usable as what they stand for."""

import pytest
import torch

from dz.weights import open_checkpoint
from dz.weights.dummy import STD, DummyCheckpoint


@pytest.fixture
def pair(tmp_path, shards_of, tensors):
    source = shards_of(tmp_path, tensors)
    return open_checkpoint(source), open_checkpoint(source, load_format="dummy")


def test_same_names_dtypes_and_shapes(pair):
    real, dummy = pair
    assert dummy.names() == real.names() and dummy.headers() == real.headers() and dummy.bytes == real.bytes
    for name, tensor in dummy:
        assert (tensor.dtype, tensor.shape) == (real.get(name).dtype, real.get(name).shape), name


def test_repeatable_in_any_order(pair):
    _, dummy = pair
    first = dict(dummy)
    for name in reversed(dummy.names()):
        assert torch.equal(dummy.get(name).flatten().view(torch.uint8), first[name].flatten().view(torch.uint8)), name


def test_seeds_and_names_differ():
    shapes = {"a": ("F32", (64, 65)), "b": ("F32", (64, 65)), "scale": ("F32", (4001,))}
    one, other = DummyCheckpoint.of_shapes("x", shapes), DummyCheckpoint.of_shapes("x", shapes, seed=1)
    assert not torch.equal(one.get("a"), one.get("b")) and not torch.equal(one.get("a"), other.get("a"))
    assert abs(float(one.get("a").mean())) < STD / 10 and float(one.get("a").std()) == pytest.approx(STD, rel=0.1)
    assert float(one.get("scale").mean()) == pytest.approx(1.0, abs=STD / 10)
    assert one.info("scale").bytes == 4001 * 4 and one.bytes == 2 * 64 * 65 * 4 + 4001 * 4


def test_values_can_stand_for_what_they_are(pair):
    _, dummy = pair
    for name in ("b.blocks", "b.scales", "b.e8m0"):
        raw = dummy.get(name).flatten().view(torch.uint8)
        assert raw.min() >= 120 and raw.max() <= 127
    assert torch.isfinite(dummy.get("b.fp8").float()).all()
    assert set(dummy.get("c.ids").flatten().tolist()) <= {0, 1}


def test_slices_agree_with_the_whole(pair):
    _, dummy = pair
    assert torch.equal(dummy.slice("a.weight", slice(1, 4)), dummy.get("a.weight")[1:4])
