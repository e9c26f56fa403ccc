"""A checkpoint of random tensors (`--load-format dummy`): the names, dtypes and shapes of a real one, no weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from blake3 import blake3

from dz.core.headers import BITS, TensorInfo
from dz.weights.checkpoint import Checkpoint
from dz.weights.formats import torch_dtype, torch_shape

STD = 0.02  # the usual initialiser of transformer weights


class DummyCheckpoint(Checkpoint):
    """Deterministic: the same seed and name give the same tensor, in whatever order tensors are asked for.

    Floats are normal with STD, about 0 for matrices and about 1 for vectors and scalars (norm scales); bytes and
    exponent bytes lie in 120..127, so that as scales they are 2^-7..1 and as packed codes finite; other integers and
    booleans are 0 or 1, valid as indices."""

    def __init__(self, name: str, infos: Mapping[str, TensorInfo], *, seed: int = 0) -> None:
        super().__init__(name, dict(infos))
        self._seed = seed

    @classmethod
    def of_shapes(
        cls, name: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]], *, seed: int = 0
    ) -> DummyCheckpoint:
        """Of given dtypes (as safetensors names them) and shapes, where there is no header at all."""
        infos, at = {}, 0
        for tensor, (dtype, shape) in shapes.items():
            size = (math.prod(shape) * BITS[dtype] + 7) // 8
            infos[tensor] = TensorInfo(tensor, dtype, tuple(shape), at, at + size)
            at += size
        return cls(name, infos, seed=seed)

    def get(self, name: str) -> torch.Tensor:
        """The tensor of this name, made anew."""
        info = self.info(name)
        dtype, shape = torch_dtype(info), torch_shape(info)
        digest = blake3(f"{self._seed}:{name}".encode()).digest(8)
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        if info.dtype in ("U8", "F8_E8M0", "F4"):
            return torch.randint(120, 128, shape, dtype=torch.uint8, generator=generator).view(dtype)
        if dtype.is_floating_point or dtype.is_complex:
            mean = 0.0 if len(shape) > 1 else 1.0
            return (torch.randn(shape, generator=generator) * STD + mean).to(dtype)
        return torch.randint(0, 2, shape, dtype=torch.int32, generator=generator).to(dtype)

    def close(self) -> None:
        """Nothing is ever open."""
