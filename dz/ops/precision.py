"""Working precision of the references: fp32 inside for every storage dtype, fp64 when asked for fp64 truth."""

from __future__ import annotations

import torch

from dz.core.op import Tolerance

# Unit roundoff u: float32 2^-24, float16 2^-11, bfloat16 2^-8. A value built by k roundings is within k * u of truth.
ELEMENTWISE = {
    # fp32: functions of different libraries (exp, rsqrt, erf) and sums in another order differ by some ulp; 128 u.
    "float32": Tolerance(1e-6, 2**-17),
    # At most four roundings: an input sum, an intermediate, a rounded operand, the result. 4 u.
    "float16": Tolerance(1e-5, 2**-9),
    "bfloat16": Tolerance(1e-5, 2**-6),
}
# Sums of products of unit-scale data: rounded operands of an inner product err relative to the sum of magnitudes, not
# to the result, so cancellation needs an absolute part. It is stated for results of order 1: 336 u in fp32 (sums of
# thousands of terms in any order), 4 u in fp16, 2.6 u in bfloat16; the relative part is the result's own roundings.
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
