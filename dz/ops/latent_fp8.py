"""The packed latent cache: one token as e4m3 latent with a scale for every 128 channels, then the rotated key.

A row of R latent and Dr rotated channels is bytes: R of e4m3, R / 128 fp32 scales, Dr bfloat16 (R 512, Dr 64: 656)."""

from __future__ import annotations

import torch
from torch import Tensor

from dz.errors import UsageError

GROUP = 128  # latent channels under one scale
LARGEST = 448.0  # of e4m3


def width(rank: int, rope: int) -> int:
    """Bytes of one row."""
    return rank + rank // GROUP * 4 + rope * 2


def pack(latent: Tensor, rope: Tensor) -> Tensor:
    """uint8 [T, width] from latent [T, R] and rotated key [T, Dr]; the scale of a group is its largest magnitude over
    448 (1 for a group of zeros)."""
    if latent.shape[1] % GROUP:
        raise UsageError(
            f"a latent of {latent.shape[1]} channels", f"scales stand for {GROUP} each", "keep it in bfloat16",
            code="bad_shape",
        )  # fmt: skip
    groups = latent.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1) / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (groups / scale[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).flatten(1)
    parts = codes, scale, rope.to(torch.bfloat16)
    return torch.cat([p.contiguous().view(torch.uint8) for p in parts], 1)


def unpack(packed: Tensor, rank: int) -> Tensor:
    """fp32 [T, R + Dr] from uint8 rows."""
    rope = packed.shape[1] - rank - rank // GROUP * 4
    if rank % GROUP or rope < 0 or rope % 2:
        raise UsageError(
            f"packed rows of {packed.shape[1]} bytes for a latent of {rank} channels",
            f"a row is R + R / {GROUP} * 4 + 2 * Dr bytes", "check the cache's layout", code="bad_shape",
        )  # fmt: skip
    codes = packed[:, :rank].contiguous().view(torch.float8_e4m3fn).float()
    scale = packed[:, rank : rank + rank // GROUP * 4].contiguous().view(torch.float32)
    tail = packed[:, rank + rank // GROUP * 4 :].contiguous().view(torch.bfloat16).float()
    return torch.cat(((codes.unflatten(1, (-1, GROUP)) * scale[..., None]).flatten(1), tail), 1)
