"""Working precision of the references: fp32 inside for every storage dtype, fp64 when asked for fp64 truth."""

from __future__ import annotations

import torch

from dz.core.op import Tolerance

# Unit roundoff: float32 2^-24, float16 2^-11, bfloat16 2^-9. A tolerance counts roundings, then doubles the sum.
ELEMENTWISE = {
    # fp32: transcendental functions of different libraries differ by a few ulp (6e-8 each); 2^-17 is 64 ulp.
    "float32": Tolerance(1e-6, 2**-17),
    # result, one rounded operand and one rounded intermediate: 3 roundings <= 2^-9.4 in fp16, 2^-7.4 in bf16.
    "float16": Tolerance(1e-5, 2**-9),
    "bfloat16": Tolerance(1e-5, 2**-7),
}
# Sums of products of unit-scale data: the rounded operands of an inner product err relative to the sum of magnitudes,
# not to the result, so that cancellation needs an absolute part: about 4 unit roundoffs of an O(1) result.
REDUCTION = {
    "float32": Tolerance(2e-5, 2**-16),
    "float16": Tolerance(2e-3, 2**-9),
    "bfloat16": Tolerance(1e-2, 2**-7),
}
EXACT = Tolerance(0.0, 0.0)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in its working precision."""
    return x.to(wide_dtype(x.dtype))
