"""Fixtures: sharded checkpoints written by the safetensors library, as Sources."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dz.core.source import FileEntry, Source


def as_source(folder: Path) -> Source:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    entries = tuple(FileEntry(path=p.relative_to(folder).as_posix(), size=p.stat().st_size) for p in files)
    return Source(name=str(folder), folder=str(folder), commit="", rev8="0" * 8, code_hash="", files=entries)


def write_shards(folder: Path, shards: list[dict[str, torch.Tensor]]) -> Source:
    """Write shards with an index."""
    weight_map = {}
    for n, tensors in enumerate(shards):
        name = f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return as_source(folder)


@pytest.fixture
def source_of():
    return as_source


@pytest.fixture
def shards_of():
    return write_shards


@pytest.fixture
def tensors() -> list[dict[str, torch.Tensor]]:
    """Three shards of ragged shapes and many dtypes, scalars and an empty tensor among them."""
    g = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (6, 10), dtype=torch.uint8, generator=g)
    return [
        {"a.weight": torch.randn(7, 5, generator=g), "a.bias": torch.randn(3, generator=g).to(torch.bfloat16)},
        {
            "b.blocks": raw,
            "b.scales": torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8),
            "b.e8m0": raw[0].clone().view(torch.float8_e8m0fnu),
            "b.fp8": raw[1:3].clone().view(torch.float8_e4m3fn),
            "b.fp4": raw[3:5].clone().view(torch.float4_e2m1fn_x2),
            "b.odd": torch.tensor([5, 6, 7], dtype=torch.int8),
        },
        {
            "c.scalar": torch.tensor(1.5, dtype=torch.float64),
            "c.empty": torch.empty(0, 4),
            "c.flag": torch.tensor([True, False, True]),
            "c.ids": torch.arange(-3, 9).reshape(3, 4),
            "c.half": torch.randn(2, 3, 4, generator=g).half(),
        },
    ]
