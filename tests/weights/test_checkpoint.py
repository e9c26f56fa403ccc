"""Real files: every tensor bit for bit, one shard at a time, no memory of its own, and refusals before any tensor."""

import json
import struct
from pathlib import Path

import pytest
import torch

from dz.errors import Refused, UsageError
from dz.weights import open_checkpoint

INDEX = "model.safetensors.index.json"
SHARD = "model-{:05d}-of-00003.safetensors"


@pytest.fixture
def source(tmp_path, shards_of, tensors):
    return shards_of(tmp_path, tensors)


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def mapped(folder: Path) -> set[str]:
    """The shards that this process has mapped."""
    text = Path("/proc/self/maps").read_text()
    return {p.name for p in folder.glob("*.safetensors") if str(p) in text}


def test_every_tensor_bit_for_bit(source, tensors):
    checkpoint = open_checkpoint(source)
    expected = {name: t for shard in tensors for name, t in shard.items()}
    seen = dict(checkpoint)
    assert set(seen) == set(expected) == set(checkpoint.names()) and len(checkpoint) == len(expected)
    for name, t in expected.items():
        assert seen[name].dtype == t.dtype and seen[name].shape == t.shape, name
        assert bits(seen[name]) == bits(t), name
        assert checkpoint.info(name).bytes == t.nbytes
    assert checkpoint.bytes == sum(t.nbytes for t in expected.values())


def test_order_is_by_shard_and_offset(source, tensors):
    shards = [next(i for i, s in enumerate(tensors) if n in s) for n in open_checkpoint(source).names()]
    assert shards == sorted(shards)
    for shard in range(3):
        names = [n for n in open_checkpoint(source).names() if n in tensors[shard]]
        begins = [open_checkpoint(source).info(n).begin for n in names]
        assert begins == sorted(begins)


def test_one_shard_is_mapped_at_a_time(source, tmp_path):
    checkpoint = open_checkpoint(source)
    assert mapped(tmp_path) == set()
    order = []
    for _, tensor in checkpoint:
        del tensor
        now = mapped(tmp_path)
        assert len(now) <= 1
        order += [n for n in now if n not in order[-1:]]
    assert order == [SHARD.format(n) for n in (1, 2, 3)]
    checkpoint.close()
    assert mapped(tmp_path) == set()


def test_a_tensor_outlives_its_turn(source, tensors):
    checkpoint = open_checkpoint(source)
    kept = checkpoint.get("a.weight")
    checkpoint.get("c.half")
    checkpoint.close()
    assert torch.equal(kept, tensors[0]["a.weight"])


def test_no_second_copy_and_the_file_stays_as_it_is(source, tmp_path):
    checkpoint = open_checkpoint(source)
    one, two = checkpoint.get("a.weight"), checkpoint.get("a.weight")
    assert one.data_ptr() == two.data_ptr()
    before = (tmp_path / SHARD.format(1)).read_bytes()
    one.zero_()
    assert (tmp_path / SHARD.format(1)).read_bytes() == before


def test_slices(source, tensors):
    checkpoint = open_checkpoint(source)
    t = tensors[0]["a.weight"]
    assert torch.equal(checkpoint.slice("a.weight", slice(2, 5)), t[2:5])
    part = checkpoint.slice("a.weight", (slice(None), slice(1, 4)))
    assert torch.equal(part, t[:, 1:4]) and part.data_ptr() == checkpoint.get("a.weight").data_ptr() + 4


def test_an_offset_that_is_not_aligned(tmp_path, source_of):
    values = torch.randn(3, 2)
    header = {
        "flag": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": "F32", "shape": [3, 2], "data_offsets": [3, 27]},
    }
    raw = json.dumps(header).encode()
    data = b"abc" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    checkpoint = open_checkpoint(source_of(tmp_path))
    assert torch.equal(checkpoint.get("x"), values) and bytes(checkpoint.get("flag").tolist()) == b"abc"


def test_memory_stays_bounded(tmp_path, shards_of):
    """Twenty shards of 4 MB are read; the process's own memory grows by less than two of them."""
    size = 4 << 20
    source = shards_of(tmp_path, [{f"t{n}": torch.full((size // 4,), float(n))} for n in range(20)])

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    checkpoint = open_checkpoint(source)
    before, most, total = anonymous(), 0, 0.0
    for _, t in checkpoint:
        total += float(t[::1024].sum())
        most = max(most, anonymous())
        del t
    assert total == sum(range(20)) * size / 4 / 1024
    assert most - before < 2 * size


def test_a_stray_file_is_never_opened(tmp_path, shards_of, tensors, source_of):
    shards_of(tmp_path, tensors)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "x.safetensors").write_bytes(b"junk")
    assert len(open_checkpoint(source_of(tmp_path))) == sum(map(len, tensors))


def test_only_the_files_of_the_source_count(tmp_path, shards_of, tensors):
    """A second index that appears after the lock was written changes nothing."""
    source = shards_of(tmp_path, tensors[:1])
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    assert set(open_checkpoint(source).names()) == set(tensors[0])


def test_unknown_tensor_and_format(source):
    with pytest.raises(UsageError) as e:
        open_checkpoint(source).info("a.wieght")
    assert "a.weight" in e.value.why
    with pytest.raises(UsageError):
        open_checkpoint(source, load_format="gguf")


@pytest.mark.parametrize("cut", [1, 30])
def test_every_fault_before_any_tensor(source, tmp_path, tensors, cut):
    path = tmp_path / SHARD.format(1)
    path.write_bytes(path.read_bytes()[:-cut])
    (tmp_path / SHARD.format(2)).unlink()
    with pytest.raises(Refused) as e:
        open_checkpoint(source)
    assert e.value.code == "incomplete" and {f.file for f in e.value.faults} == {SHARD.format(1), SHARD.format(2)}
    assert mapped(tmp_path) == set()


def test_index_against_headers(source, tmp_path):
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = SHARD.format(1)
    del index["weight_map"]["a.bias"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(Refused) as e:
        open_checkpoint(source)
    assert {f.code for f in e.value.faults} == {"missing_tensor", "extra_tensor"}
    assert "ghost" in e.value.why and "a.bias" in e.value.why


def test_no_weights(tmp_path, source_of):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused) as e:
        open_checkpoint(source_of(tmp_path))
    assert e.value.code == "no_weights"


def test_a_dtype_that_torch_has_not(tmp_path, source_of):
    header = {"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + b"abc")
    with pytest.raises(Refused) as e:
        open_checkpoint(source_of(tmp_path)).get("x")
    assert e.value.code == "no_dtype" and "F6_E2M3" in e.value.what
