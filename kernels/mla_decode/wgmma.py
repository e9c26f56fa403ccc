"""Latent attention over paged caches on Hopper's asynchronous matrix units, split over programs and combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.latent import RANK, ROPE, Latent, attend
from dz.kernels.common.parts import HALVES
from dz.kernels.common.refuse import off_grid, support
from dz.kernels.common.tuned import Tunable
from dz.kernels.mla_decode._support import supports as shared
from dz.ops.latent_fp8 import width

TUNE = Tunable(
    "mla_decode/wgmma",
    {"registers": 40, "packed_registers": 104},
    {"default": [{"registers": r, "packed_registers": p} for r, p in ((32, 96), (40, 104), (40, 112), (40, 120))]},
)


def run(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    value_dim: int = 512,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See dz.ops.mla_decode.reference."""
    cfg, page = TUNE.pick(q.device), cache.shape[1]
    registers = cfg["packed_registers" if cache.dtype == torch.uint8 else "registers"]
    rows = cache.view(-1, cache.shape[2])
    given = Latent(q=q, kv=rows, table=block_table, scale=scale, sink=sink, lengths=lengths, page=page)
    return attend(given, registers=registers)


def supports(args: Mapping[str, Any]) -> Support:
    """Latents of 512 with 64 rotated channels; caches in q's dtype, or packed for bfloat16; rows on 16 bytes."""
    q, cache, rank = args["q"], args["cache"], args.get("value_dim", 512)
    packed, rope = cache.dtype == torch.uint8, q.shape[-1] - rank
    fits = width(RANK, ROPE) if packed else RANK + ROPE
    return support(
        shared(args).reason,
        "packed rows for float16 queries" if packed and q.dtype != torch.bfloat16 else "",
        f"latents of {rank} with {rope} rotated channels; takes 512 with 64" if (rank, rope) != (RANK, ROPE) else "",
        f"rows of {cache.shape[2]}, not {fits}" if cache.shape[2] != fits else "",
        off_grid(args, ("q", "cache")),
    )


KERNEL = Kernel(
    op="mla_decode",
    technique="wgmma",
    summary="warps that gather pages beside warps that multiply, on Hopper's asynchronous matrix units",
    run=run,
    requires=Requires(device=("cuda",), arch=(90, 90), dtypes=HALVES, phases=("decode",)),
    supports=supports,
    interpreter="Gluon programs address the chip's own units",
)
