"""Grouped matrix product of experts kept in MXFP4: rows sorted by expert, activations in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops import mxfp4_unpack
from dz.ops.cases import Maker
from dz.ops.grouped_gemm_fp8 import check_offsets, sorted_offsets
from dz.ops.precision import REDUCTION, wide


def reference(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[M, N] in x's dtype: `out[r, n] = sum_k x[r, k] * value[e, n, k]`, products and sums in fp32.

    x [M, K]; packed [E, N, K/2] or [E, N, K/32, 16] with scales [E, N, K/32] as in mxfp4_unpack; expert e has the rows
    offsets[e] to offsets[e + 1] (int32 [E + 1], rising from 0, at most M). Rows from offsets[E] on belong to no expert
    and are zero. Raises UsageError for offsets of another length and for codes that do not fit their scales."""
    experts, n = scales.shape[:2]
    check_offsets(offsets, experts)
    work = wide(x)
    kind = str(work.dtype).removeprefix("torch.")
    out = torch.zeros(x.shape[0], n, dtype=work.dtype, device=x.device)
    ends = offsets.tolist()
    for e in range(experts):
        if ends[e] < ends[e + 1]:
            rows = slice(ends[e], ends[e + 1])
            out[rows] = work[rows] @ mxfp4_unpack.reference(packed[e], scales[e], dtype=kind).T
    return out.to(x.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: ragged experts, some empty, one row, rows of no expert, sizes off every tile, both layouts, the extreme
    scales, long K, strided rows, none."""
    m = Maker(dtype, device, seed)

    def case(counts: list[int], n: int, k: int, *, more: int = 0, low: int = 124, high: int = 128) -> dict:
        rows, experts = sum(counts) + more, len(counts)
        return {
            "x": m.normal(rows, k, scale=0.5 * k**-0.5),
            "packed": m.ints(0, 256, experts, n, k // 2, dtype="uint8"),
            "scales": m.ints(low, high, experts, n, k // 32, dtype="uint8"),
            "offsets": sorted_offsets(m, counts),
        }

    yield Case("e3_ragged_n48_k128", case([5, 0, 19], 48, 128))
    yield Case("e5_some_empty_n136_k288", case([0, 33, 0, 70, 0], 136, 288))
    yield Case("one_row_of_eight_experts", case([0, 0, 0, 1, 0, 0, 0, 0], 80, 256))
    yield Case("rows_of_no_expert", case([3, 18], 24, 160, more=9))
    yield Case("all_rows_of_no_expert", case([0, 0], 24, 32, more=5))
    yield Case("one_expert_m1_n1_k32", case([1], 1, 32))
    yield Case("e2_k1056_long", case([17, 3], 40, 1056))
    blocked = case([2, 9], 33, 384)
    yield Case("blocked_layout", {**blocked, "packed": blocked["packed"].view(2, 33, 12, 16)})
    tiny = case([4, 2], 40, 128, low=0, high=3)  # values about 2^-126
    yield Case("scale_bytes_0_to_2", {**tiny, "x": m.normal(6, 128, scale=2.0**120)})
    huge = case([4, 2], 40, 128, low=252, high=255)
    huge["packed"] &= 0x99  # only +-0 and +-0.5: 2^127 * 0.5 is still a number
    yield Case("scale_bytes_252_to_254", {**huge, "x": m.normal(6, 128, scale=2.0**-110)})
    mixed = case([1, 20], 72, 256)
    mixed["scales"][1, 3, 5] = 140  # the kernel's fast way ends at 128
    mixed["packed"][1, 3] &= 0x99
    yield Case("one_large_scale", mixed)
    strided = case([4, 6], 33, 64)
    strided["x"] = m.normal(10, 200, scale=0.1)[:, 8:136:2]
    yield Case("strided", strided)
    rows = case([4, 6], 64, 128)
    rows["x"] = m.normal(10, 256, scale=0.1)[:, 128:]
    yield Case("strided_rows", rows)
    yield Case("no_rows", case([0, 0], 16, 32))


OP = Op(
    name="grouped_gemm_mxfp4",
    summary="matrix products of sorted rows with their experts' MXFP4 weights",
    reference=reference,
    tolerance={k: REDUCTION[k] for k in ("bfloat16",)},
    inputs=inputs,
    kind="function",
    source="OCP Microscaling Formats (MX) 1.0",
)
