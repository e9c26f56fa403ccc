"""Latent attention over chosen rows on Hopper's asynchronous matrix units; few queries are split and combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.latent import RANK, ROPE, Latent, attend
from dz.kernels.common.parts import HALVES
from dz.kernels.common.refuse import dtypes, off_grid, one_device, same_dtype, support, unknown
from dz.kernels.common.tuned import Tunable
from dz.ops.latent_fp8 import width

TUNE = Tunable(
    "sparse_mla/wgmma",
    {"registers": 40, "packed_registers": 112},
    {"default": [{"registers": r, "packed_registers": p} for r, p in ((32, 96), (40, 104), (40, 112), (40, 120))]},
)


def run(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, value_dim: int = 512, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See dz.ops.sparse_mla.reference."""
    cfg = TUNE.pick(q.device)
    indices = indices if indices.stride(-1) == 1 else indices.contiguous()
    registers = cfg["packed_registers" if kv.dtype == torch.uint8 else "registers"]
    return attend(Latent(q=q, kv=kv, table=indices, scale=scale, sink=sink), registers=registers)


def supports(args: Mapping[str, Any]) -> Support:
    """Latents of 512 with 64 rotated channels; caches in q's dtype, or packed for bfloat16; rows on 16 bytes."""
    q, kv, rank, sink = args["q"], args["kv"], args.get("value_dim", 512), args.get("sink")
    packed, rope = kv.dtype == torch.uint8, q.shape[-1] - rank
    fits = width(RANK, ROPE) if packed else RANK + ROPE
    return support(
        unknown(args, ("q", "kv", "indices", "scale", "value_dim", "sink")),
        dtypes(args, ("q",), ("bfloat16",) if packed else HALVES),
        dtypes(args, ("kv",), (*HALVES, "uint8")),
        dtypes(args, ("indices",), ("int32",)),
        dtypes(args, ("sink",), ("float32",)),
        "" if packed else same_dtype(args, ("q", "kv")),
        one_device(args),
        f"latents of {rank} with {rope} rotated channels; takes 512 with 64" if (rank, rope) != (RANK, ROPE) else "",
        f"rows of {kv.shape[1]}, not {fits}" if kv.shape[1] != fits else "",
        "no choices" if not args["indices"].shape[1] else "",
        "an empty cache" if not kv.shape[0] else "",
        off_grid(args, ("q", "kv")),
        "sinks with gaps" if sink is not None and not sink.is_contiguous() else "",
    )


KERNEL = Kernel(
    op="sparse_mla",
    technique="wgmma",
    summary="warps that gather beside warps that multiply, on Hopper's asynchronous matrix units; splits few queries",
    run=run,
    requires=Requires(device=("cuda",), arch=(90, 90), dtypes=HALVES),
    supports=supports,
    interpreter="Gluon programs address the chip's own units",
)
