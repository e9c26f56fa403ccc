"""Grouped matrix product of experts in FP8: rows sorted by expert, one scale per row of either operand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide_dtype


def check_offsets(offsets: torch.Tensor, experts: int) -> None:
    """Raise UsageError unless `offsets` has one entry more than there are experts (its values are not read)."""
    if offsets.shape != (experts + 1,):
        raise UsageError(
            f"offsets of shape {list(offsets.shape)} for {experts} experts",
            f"{experts + 1} of them are expected: where each expert's rows begin, and where the last one's end",
            "take them from expert_permute",
            code="bad_shape",
        )


def reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    offsets: torch.Tensor,
    *,
    dtype: str = "bfloat16",
) -> torch.Tensor:
    """[M, N] in `dtype`: `out[r, n] = x_scale[r] * weight_scale[e, n] * sum_k x[r, k] * weight[e, n, k]`.

    x float8_e4m3fn [M, K] with x_scale float32 [M]; weight float8_e4m3fn [E, N, K] with weight_scale float32 [E, N];
    expert e has the rows offsets[e] to offsets[e + 1] (int32 [E + 1], rising from 0, at most M). Rows from offsets[E]
    on belong to no expert and are zero. Products and sums in fp32 (float64 if the scales are, and then the result
    too). Raises UsageError for offsets of another length."""
    experts, n = weight.shape[:2]
    check_offsets(offsets, experts)
    work = wide_dtype(x_scale.dtype)
    out = torch.zeros(x.shape[0], n, dtype=work, device=x.device)
    ends = offsets.tolist()
    for e in range(experts):
        rows = slice(ends[e], ends[e + 1])
        product = x[rows].to(work) @ weight[e].to(work).T
        out[rows] = product * x_scale[rows, None].to(work) * weight_scale[e].to(work)
    return out if work == torch.float64 else out.to(getattr(torch, dtype))


def sorted_offsets(m: Maker, counts: Sequence[int]) -> torch.Tensor:
    """Offsets int32 [E + 1] of experts with so many rows each."""
    return m.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], "int32")


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: ragged experts, some empty, one row, rows of no expert, N and K off every tile, long K, strided, none."""
    m = Maker(dtype, device, seed)

    def case(counts: list[int], n: int, k: int, *, more: int = 0) -> dict:
        rows, experts = sum(counts) + more, len(counts)
        exponents = m.ints(-3, 4, experts, n, dtype="float32")
        return {
            "x": m.normal(rows, k, scale=8.0, dtype="float8_e4m3fn"),
            "x_scale": m.normal(rows, scale=0.01, shift=0.125, dtype="float32"),
            "weight": m.normal(experts, n, k, scale=8.0, dtype="float8_e4m3fn"),
            # unit-scale results: 8 * 8 * 0.125 * 2^-3 * k^-0.5
            "weight_scale": torch.exp2(exponents) * (0.125 * k**-0.5),
            "offsets": sorted_offsets(m, counts),
            "dtype": dtype,
        }

    yield Case("e3_ragged_n48_k96", case([5, 0, 19], 48, 96))
    yield Case("e5_some_empty_n136_k272", case([0, 33, 0, 140, 0], 136, 272))
    yield Case("one_row_of_eight_experts", case([0, 0, 0, 1, 0, 0, 0, 0], 80, 128))
    yield Case("rows_of_no_expert", case([3, 70], 24, 160, more=9))
    yield Case("all_rows_of_no_expert", case([0, 0], 24, 32, more=5))
    yield Case("one_expert_m1_n1_k16", case([1], 1, 16))
    yield Case("e2_k1040_long", case([130, 3], 40, 1040))
    yield Case("no_rows", case([0, 0], 16, 32))
    strided = case([4, 6], 33, 64)
    strided["x"] = m.normal(10, 128, scale=8.0, dtype="float8_e4m3fn")[:, 64:]
    strided["weight_scale"] = m.normal(33, 2, scale=1e-3, shift=0.01, dtype="float32").T
    yield Case("strided", strided)


OP = Op(
    name="grouped_gemm_fp8",
    summary="matrix products of sorted rows with their experts' FP8 weights, scaled by row on both sides",
    reference=reference,
    tolerance={k: REDUCTION[k] for k in ("bfloat16",)},
    inputs=inputs,
    kind="function",
    source="arXiv:2412.19437, 3.3 (promotion to fp32 every 128 of the inner dimension)",
)
