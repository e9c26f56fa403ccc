"""MXFP4 to FP8 e4m3 by an exact fold of the block exponents into one power-of-two scale per output row."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.errors import Refused
from dz.ops.cases import Maker
from dz.ops.mxfp4_unpack import E2M1, blocks, nibbles
from dz.ops.precision import EXACT

HEADROOM = 6  # e2m1 * 2^6 <= 384 still fits e4m3 (448); 2^7 would not
EXACT_SPREAD = 14  # 2^(6 - 14) * 0.5 = 2^-9 is e4m3's smallest number


def reference(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes float8_e4m3fn [..., N, K], row scales float32 [..., N], spread int32 [..., N]) with
    `value[n, k] = codes[n, k] * row_scale[n]`.

    packed [..., N, K/32, 16] or [..., N, K/2], scales [..., N, K/32]. With e the block's scale byte and e_max the
    largest of the blocks that hold a non-zero code: `row_scale = 2^(e_max - 133)`, `code = e2m1 * 2^(e - e_max + 6)`.
    `spread` is e_max - e_min over those blocks: up to 14 every code is exact; above, small codes round to nearest even
    (error <= 2^-10 * row_scale) and the caller decides (`require_exact`). A row of zeros has scale 1 and spread 0. A
    scale byte of 255 makes its block NaN (0x7F) and takes no part in e_max."""
    codes, exps = blocks(packed, scales)
    values = torch.tensor(E2M1, dtype=torch.float32, device=packed.device)[nibbles(codes)]
    e = exps.to(torch.int32)
    counts = (values != 0).any(-1) & (e != 255)
    high = torch.where(counts, e, -1).amax(-1)
    low = torch.where(counts, e, 256).amin(-1)
    empty = high < 0
    shift = torch.where(counts, e - high[..., None] + HEADROOM, 0)
    # a shift below -12 gives 0 in every case; the clamp keeps 2^shift a normal float32
    folded = torch.ldexp(values, shift.clamp(min=-100)[..., None].expand(values.shape)).to(torch.float8_e4m3fn)
    bits = folded.view(torch.uint8).masked_fill((e == 255)[..., None], 0x7F)
    scale = torch.ldexp(torch.ones_like(high, dtype=torch.float64), high - 127 - HEADROOM).masked_fill(empty, 1.0)
    spread = torch.where(empty, 0, high - low).to(torch.int32)
    return bits.flatten(-2).view(torch.float8_e4m3fn), scale.float(), spread


def require_exact(spread: torch.Tensor, name: str) -> None:
    """Raise Refused naming the tensor and how many rows exceed the spread that folds exactly."""
    over = int((spread > EXACT_SPREAD).sum())
    if over:
        raise Refused(
            f"{name} does not fold to FP8 exactly",
            f"{over} of {spread.numel()} rows span more than {EXACT_SPREAD} powers of two, at most {int(spread.max())}",
            "run it from MXFP4: --set experts=reference",
            code="inexact_fold",
        )


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: spreads 0, 14, 15, 17 and 40, zero blocks and rows with stray exponents, both layouts, extremes, none."""
    m = Maker(dtype, device, seed)

    def rows(exps: list[list[int]]) -> dict:
        shape = (len(exps), len(exps[0]), 16)
        return {"packed": m.ints(0, 256, *shape, dtype="uint8"), "scales": m.tensor(exps, "uint8")}

    spreads = [[120, 120, 120], [113, 127, 120], [112, 127, 120], [110, 127, 127], [90, 130, 116]]
    yield Case("spreads_0_14_15_17_40", rows(spreads))
    sparse = rows([[250, 120, 3], [250, 120, 3], [0, 1, 2], [254, 240, 250]])
    sparse["packed"][0, 0] = 0x80  # zeros of both signs under an exponent that must not count
    sparse["packed"][0, 2] = 0
    sparse["packed"][1] = 0
    yield Case("zero_blocks_zero_row_extremes", sparse)
    flat = {"packed": m.ints(0, 256, 7, 80, dtype="uint8"), "scales": m.ints(113, 128, 7, 5, dtype="uint8")}
    yield Case("flat_n7_k160", flat)
    stack = {"packed": m.ints(0, 256, 2, 3, 4, 16, dtype="uint8"), "scales": m.ints(113, 128, 2, 3, 4, dtype="uint8")}
    yield Case("experts2_n3_k128", stack)
    strided = {
        "packed": m.ints(0, 256, 6, 96, dtype="uint8")[::2, 48:],
        "scales": m.ints(115, 129, 3, 6, dtype="uint8")[:, ::2],
    }
    yield Case("strided", {**strided})
    yield Case("one_block", rows([[127]]))
    yield Case("no_rows", {"packed": flat["packed"][:0], "scales": flat["scales"][:0]})
    long = {"packed": m.ints(0, 256, 3, 1040, dtype="uint8"), "scales": m.ints(100, 131, 3, 65, dtype="uint8")}
    yield Case("n3_k2080_long_spread_30", long)


OP = Op(
    name="mxfp4_to_fp8",
    summary="MXFP4 to FP8 e4m3 with an exact power-of-two scale per row",
    reference=reference,
    tolerance={"float8_e4m3fn": EXACT},
    inputs=inputs,
    kind="function",
    source="OCP Microscaling Formats (MX) 1.0; exactness by enumeration of 16 codes x exponents",
)
