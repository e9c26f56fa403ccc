"""Token embedding: a row of the table for each id, optionally scaled."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops._dense import embedding as recognise
from dz.ops.cases import Maker
from dz.ops.precision import ELEMENTWISE


def reference(ids: torch.Tensor, weight: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """`weight[ids] * scale`: ids [...] of a whole-number dtype, weight [V, D] -> [..., D] in weight's dtype.

    The scale is rounded to weight's dtype before it multiplies, as upstream's scaled embeddings do (sqrt(D) is not
    exact in bfloat16). An id outside [0, V) raises IndexError."""
    out = torch.nn.functional.embedding(ids, weight)
    return out if scale == 1.0 else out * torch.tensor(scale, dtype=weight.dtype, device=weight.device)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: batch, one id, none, repeated ids, int32 ids, a strided table, a scale that is inexact in bfloat16."""
    m = Maker(dtype, device, seed)
    table = m.normal(37, 19)
    yield Case("batch2x5_v37_d19", {"ids": m.ints(0, 37, 2, 5), "weight": table})
    yield Case("one", {"ids": m.tensor([36]), "weight": table})
    yield Case("empty", {"ids": m.ints(0, 37, 0), "weight": table})
    yield Case("repeated_int32", {"ids": m.tensor([3, 3, 0, 36, 3], "int32"), "weight": table})
    yield Case("strided_table_strided_ids", {"ids": m.ints(0, 37, 6, 4)[:, ::2], "weight": m.normal(37, 40)[:, ::2]})
    # 12 is exact in every dtype, so the truth in float64 and the kernel see the same scale
    yield Case("long300_scale12", {"ids": m.ints(0, 37, 300), "weight": table, "scale": 12.0})


OP = Op(
    name="embedding",
    summary="token embedding, optionally scaled",
    reference=reference,
    tolerance=ELEMENTWISE,  # exact without a scale, one rounding with it
    inputs=inputs,
    recognise=recognise,
)
