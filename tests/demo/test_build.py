import json

import pytest
import torch
from safetensors import safe_open

from dz.core.headers import read_header
from dz.demo.build import END_TOKEN, REPOSITORY, build, silent_rows, values
from dz.demo.layout import Tensor
from dz.errors import EnvironmentFailure


def everything(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_the_same_bytes_every_time(repository, tmp_path):
    assert everything(build(tmp_path / "again")) == everything(repository)


def test_refuses_a_folder_that_holds_something(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(EnvironmentFailure, match="is not empty"):
        build(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_shards_and_index_agree(repository):
    index = json.loads((repository / "model.safetensors.index.json").read_text())
    held = {}
    for file in sorted(set(index["weight_map"].values())):
        held |= dict.fromkeys(read_header(repository / file).tensors, file)
    assert held == index["weight_map"]
    assert len(set(held.values())) == 2
    sizes = [t.bytes for f in set(held.values()) for t in read_header(repository / f).tensors.values()]
    assert sum(sizes) == index["metadata"]["total_size"]


def test_committed_part_is_small():
    assert sum(p.stat().st_size for p in REPOSITORY.rglob("*") if p.is_file()) < 200_000


def test_every_fill_is_different_and_alive():
    fills = ("matrix", "embedding", "bias", "norm", "codes", "scales", "decay", "small")
    for fill in fills:
        a, b = (values(Tensor(name, (8, 4), fill), []) for name in ("a", "b"))
        assert a.shape == (8, 4) and not torch.equal(a, b) and a.unique().numel() > 2
        assert a.dtype == (torch.uint8 if fill in ("codes", "scales") else torch.float32)


def test_silent_tokens_are_special_or_unprintable(repository):
    silent = silent_rows(repository / "tokenizer.json")
    vocabulary = json.loads((repository / "tokenizer.json").read_text())["model"]["vocab"]
    spoken = [t for t, i in vocabulary.items() if i not in silent]
    assert END_TOKEN not in silent and 0 in silent
    assert len(spoken) > 300 and all(c.isascii() or c in "ĠĊ" for t in spoken for c in t)
    with safe_open(repository / "model-00002-of-00002.safetensors", "pt") as f:
        head = f.get_tensor("lm_head.weight")
    assert (head[silent] == 0).all() and (head[END_TOKEN] != 0).all()
