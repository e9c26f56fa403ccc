"""MXFP4: detection from headers, golden values for every layout, round trips."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.core.headers import TensorInfo
from dz.errors import Refused
from dz.ops.mxfp4_unpack import E2M1, reference
from dz.weights import mxfp4

# codes 0..15 twice, low nibble first: written by hand from the OCP table, not by the code under test
ROW = bytes.fromhex("1032547698badcfe1032547698badcfe")
GOLDEN = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def codes(raw: bytes = ROW) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def info(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape, 0, 0)


def headers(*infos: TensorInfo) -> dict[str, TensorInfo]:
    return {i.name: i for i in infos}


STACKED = headers(
    info("l.0.mlp.experts.gate_up_proj_blocks", "U8", 4, 6, 2, 16),
    info("l.0.mlp.experts.gate_up_proj_scales", "U8", 4, 6, 2),
    info("l.0.mlp.experts.gate_up_proj_bias", "BF16", 4, 6),
    info("l.0.attn.weight", "BF16", 64, 64),
)
FLAT = headers(
    info("e.0.w1.weight_packed", "U8", 6, 32),
    info("e.0.w1.weight_scale", "U8", 6, 2),
    info("head.weight", "BF16", 6, 64),
)
EXPERTS_FP4 = headers(
    info("e.0.w1.weight", "I8", 6, 32),
    info("e.0.w1.scale", "F8_E8M0", 6, 2),
    info("attn.weight", "F8_E4M3", 256, 256),
    info("attn.scale", "F8_E8M0", 2, 2),
)
QUARK = headers(info("m.weight", "U8", 6, 32), info("m.weight_scale", "U8", 6, 2))
CT = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
CT["config_groups"] = {"group_0": {"weights": {"group_size": 32}}}
QUARK_CONFIG = {"quant_method": "quark"}
QUARK_CONFIG["global_quant_config"] = {"weight": {"dtype": "fp4", "scale_format": "e8m0", "group_size": 32}}
LAYOUTS = {
    "blocks": (STACKED, {"quantization_config": {"quant_method": "mxfp4"}}, "blocks", (4, 6, 64)),
    "compressed-tensors": (FLAT, {"text_config": {"quantization_config": CT}}, "flat", (6, 64)),
    "fp8 with fp4 experts": (
        EXPERTS_FP4, {"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}, "flat", (6, 64)
    ),
    "quark": (QUARK, {"quantization_config": QUARK_CONFIG}, "flat", (6, 64)),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "layout", "shape"), LAYOUTS.values(), ids=LAYOUTS)
def test_each_producer_is_found(tensors, config, layout, shape):
    (found,) = mxfp4.detect(tensors, config)
    assert (found.layout, found.shape) == (layout, shape)
    assert found.codes in tensors and found.scales in tensors and found.codes != found.scales


def test_names_of_the_logical_tensors():
    assert mxfp4.detect(STACKED, LAYOUTS["blocks"][1])[0].name == "l.0.mlp.experts.gate_up_proj"
    assert mxfp4.detect(FLAT, LAYOUTS["compressed-tensors"][1])[0].name == "e.0.w1.weight"


@pytest.mark.parametrize("name", LAYOUTS)
def test_undeclared_is_refused(name):
    with pytest.raises(Refused) as e:
        mxfp4.detect(LAYOUTS[name][0], {"quantization_config": {"quant_method": "newcomer"}})
    assert e.value.code == "mxfp4_undeclared"


@pytest.mark.parametrize("other", [n for n in LAYOUTS if n != "quark"])
def test_another_producers_declaration_is_refused(other):
    with pytest.raises(Refused) as e:
        mxfp4.detect(QUARK, LAYOUTS[other][1])
    assert e.value.code == "mxfp4_mismatch"


def test_declared_but_absent_or_damaged_is_refused():
    config = LAYOUTS["compressed-tensors"][1]
    lone = headers(*FLAT.values(), info("e.1.w1.weight_packed", "U8", 6, 32))
    thin = headers(*FLAT.values(), info("e.1.w1.weight_packed", "U8", 6, 32), info("e.1.w1.weight_scale", "U8", 6, 4))
    for tensors in ({}, headers(info("head.weight", "BF16", 6, 64)), lone, thin):
        with pytest.raises(Refused) as e:
            mxfp4.detect(tensors, config)
        assert e.value.code == "mxfp4_mismatch"


def test_a_declared_group_other_than_32_is_refused():
    wrong = {**CT, "config_groups": {"group_0": {"weights": {"group_size": 16}}}}
    with pytest.raises(Refused, match="group size 16"):
        mxfp4.declaration({"quantization_config": wrong})


def test_other_formats_are_not_mxfp4():
    others = headers(
        info("a.weight", "U8", 6, 32), info("a.weight_scale", "F8_E4M3", 6, 4),  # NVFP4
        info("b.weight", "I8", 6, 64), info("b.weight_scale", "F32", 6, 1),  # int8
        info("c.weight_packed", "I32", 6, 8), info("c.weight_scale", "BF16", 6, 2),  # int4
        info("d.weight", "U8", 6, 48), info("d.weight_scale", "U8", 6, 2),  # 6 bits
    )  # fmt: skip
    assert mxfp4.detect(others, {}) == ()


def test_golden_values_of_every_layout():
    """Swapped nibbles would give 0.5, 0, 1.5, 1, ...: nothing but values can tell."""
    want = torch.tensor(GOLDEN * 2) * 2
    scale = torch.tensor([128], dtype=torch.uint8)
    flat, stacked, signed = codes(), codes().view(1, 16), codes().view(torch.int8)
    for c, s in ((flat, scale), (stacked, scale), (signed, scale.view(torch.float8_e8m0fnu))):
        assert torch.equal(mxfp4.unpack(c, s, "t", dtype="float32"), want)
    assert torch.equal(mxfp4.to_blocks(flat), stacked)


def test_scale_bytes():
    byte = torch.tensor([[0], [1], [127], [252]], dtype=torch.uint8)
    one = torch.full((4, 16), 0x22, dtype=torch.uint8)
    got = mxfp4.unpack(one, byte, "t", dtype="float64")[:, 0]
    assert got.tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**125]


def test_byte_255_is_refused_and_is_nan_in_the_op():
    scales = torch.tensor([[127, 255]], dtype=torch.uint8)
    packed = codes().repeat(1, 2)
    with pytest.raises(Refused) as e:
        mxfp4.unpack(packed, scales, "layer.w")
    assert e.value.code == "mxfp4_nan" and "layer.w holds 1" in e.value.what
    nan = reference(packed, scales).isnan()
    assert nan[0, 32:].all() and not nan[0, :32].any()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31), st.integers(0, 254), st.integers(1, 40))
def test_values_survive_pack_and_unpack(rows, blocks, seed, low, span):
    """Whatever unpacks from codes packs back to equal values (the codes may differ: 2 * 2^0 is 1 * 2^1)."""
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, blocks * 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(low, min(255, low + span), (rows, blocks), generator=g).to(torch.uint8)
    values = reference(packed, scales, dtype="float64")
    again = reference(*mxfp4.quantise(values), dtype="float64")
    assert torch.equal(again, values)
    assert torch.equal(again.signbit(), values.signbit())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-30, 1e30))
def test_quantising_picks_the_nearest_code(seed, size):
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size
    packed, scales = mxfp4.quantise(x)
    got = reference(packed, scales, dtype="float64").view(2, 2, 32)
    step = torch.ldexp(torch.ones(2, 2, dtype=torch.float64), scales.int() - 127)[..., None]
    table = torch.tensor(E2M1, dtype=torch.float64) * step[..., None, :]
    best = (x.view(2, 2, 32, 1) - table.view(2, 2, 1, 16)).abs().amin(-1)
    assert torch.equal((x.view(2, 2, 32) - got).abs(), best)


def test_quantise_ties_saturation_zero_and_not_finite():
    x = torch.zeros(2, 32)
    x[0, :9] = torch.tensor([7.9, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, -0.25, -0.0])
    packed, scales = mxfp4.quantise(x)
    got = reference(packed, scales, dtype="float32")
    assert got[0, :8].tolist() == [6, 0, 1, 1, 2, 4, 4, 0]
    assert got[0, 7:9].signbit().all() and scales[1, 0] == 0 and not got[1].any()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(Refused):
            mxfp4.quantise(torch.full((1, 32), bad))
