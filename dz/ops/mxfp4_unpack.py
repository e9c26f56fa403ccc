"""MXFP4 to floating point: 4-bit e2m1 codes, one power-of-two scale for 32 of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.inventory import Match, SiteView
from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops import _probe
from dz.ops.cases import Maker
from dz.ops.precision import EXACT

BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
OUTPUTS = ("float32", "bfloat16", "float64")


def as_bytes(t: torch.Tensor, what: str) -> torch.Tensor:
    """`t` seen as uint8 (uint8, int8 and float8_e8m0fnu hold the same bytes). Raises UsageError for other dtypes."""
    if t.dtype == torch.uint8:
        return t
    if t.dtype in (torch.int8, torch.float8_e8m0fnu):
        return t.view(torch.uint8)
    raise UsageError(
        f"MXFP4 {what} of dtype {t.dtype}",
        "bytes are expected: uint8, int8 or float8_e8m0fnu",
        "check the tensor",
        code="bad_dtype",
    )


def blocks(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes [..., K/32, 16], scale bytes [..., K/32]) of either layout: packed [..., K/32, 16] or flat [..., K/2].

    Raises UsageError when the two shapes do not belong together."""
    codes, exps = as_bytes(packed, "codes"), as_bytes(scales, "scales")
    half = BLOCK // 2
    if codes.shape == (*exps.shape, half):
        return codes, exps
    if exps.dim() and codes.shape == (*exps.shape[:-1], exps.shape[-1] * half):
        return codes.reshape(*exps.shape, half), exps
    raise UsageError(
        f"MXFP4 codes {list(packed.shape)} with scales {list(scales.shape)}",
        "one scale for 16 bytes along the last axis is expected",
        "check the pair of tensors",
        code="bad_shape",
    )


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (int64) [..., 32] of bytes [..., 16]: the LOW nibble is the even element."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()


def scale_of(exps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`2^(byte - 127)`, byte 255 is NaN (OCP Microscaling 1.0, E8M0). Byte 0 is 2^-127, not zero."""
    value = torch.ldexp(torch.ones_like(exps, dtype=torch.float64), exps.to(torch.int32) - 127)
    return torch.where(exps == 255, float("nan"), value).to(dtype)


def reference(packed: torch.Tensor, scales: torch.Tensor, *, dtype: str = "bfloat16") -> torch.Tensor:
    """Values [..., K] in `dtype`: `e2m1[code] * 2^(scale - 127)`, exact in float32, bfloat16 and float64.

    packed [..., K/32, 16] or [..., K/2], scales [..., K/32]; the low nibble is the even element. Products of 2^128 and
    more (scale bytes 253 and 254 only) become infinite. A scale byte of 255 makes its 32 values NaN.
    float16 is refused: it holds only 37 of the 255 exponents."""
    if dtype not in OUTPUTS:
        raise UsageError(
            f"MXFP4 unpacked to {dtype}",
            f"it is exact in {', '.join(OUTPUTS)} only",
            "choose one of them",
            code="bad_dtype",
        )
    codes, exps = blocks(packed, scales)
    table = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)
    values = table[nibbles(codes)] * scale_of(exps, torch.float64)[..., None]
    return values.flatten(-2).to(getattr(torch, dtype))


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: all codes under all scales but 255, both layouts, expert stacks, int8 and e8m0 views, strided, none."""
    m = Maker(dtype, device, seed)
    out = {"dtype": dtype}
    everything = torch.arange(16).repeat(2)
    every = (everything[0::2] | everything[1::2] << 4).to(torch.uint8).to(device)
    scales = torch.arange(255, dtype=torch.uint8, device=device)
    yield Case("all_codes_all_scales", {"packed": every.repeat(255, 1), "scales": scales.view(255, 1), **out})
    codes, exps = m.ints(0, 256, 5, 3, 16, dtype="uint8"), m.ints(110, 140, 5, 3, dtype="uint8")
    yield Case("blocks_n5_k96", {"packed": codes, "scales": exps, **out})
    yield Case("flat_n5_k96", {"packed": codes.view(5, 48), "scales": exps, **out})
    stack = {"packed": m.ints(0, 256, 2, 7, 2, 16, dtype="uint8"), "scales": m.ints(100, 150, 2, 7, 2, dtype="uint8")}
    yield Case("experts2_n7_k64", {**stack, **out})
    signed = {"packed": codes.view(5, 48).view(torch.int8), "scales": exps.view(torch.float8_e8m0fnu)}
    yield Case("int8_with_e8m0", {**signed, **out})
    strided = {
        "packed": m.ints(0, 256, 10, 96, dtype="uint8")[::2, 48:],
        "scales": m.ints(90, 160, 10, 3, dtype="uint8")[1::2],
    }
    yield Case("strided_rows", {**strided, **out})
    yield Case("transposed_experts", {"packed": codes.transpose(0, 1), "scales": exps.transpose(0, 1), **out})
    yield Case(
        "one_block",
        {"packed": m.ints(0, 256, 1, 16, dtype="uint8"), "scales": m.ints(0, 255, 1, 1, dtype="uint8"), **out},
    )
    yield Case("no_rows", {"packed": codes[:0], "scales": exps[:0], **out})
    long = {"packed": m.ints(0, 256, 3, 1040, dtype="uint8"), "scales": m.ints(60, 200, 3, 65, dtype="uint8")}
    yield Case("n3_k2080_long", {**long, **out})


def recognise(site: SiteView) -> Match | None:
    """A function that unpacks, proved on random bytes."""
    return _probe.mxfp4_unpack(site, reference)


OP = Op(
    name="mxfp4_unpack",
    summary="MXFP4 codes and scales to floating point",
    reference=reference,
    tolerance={"float32": EXACT, "bfloat16": EXACT},
    inputs=inputs,
    recognise=recognise,
    kind="function",
    source="OCP Microscaling Formats (MX) 1.0",
)
