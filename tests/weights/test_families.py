"""Formats of quantised weights: recognised from headers and configuration, refused when the two disagree."""

import json
from math import prod

import pytest

from dz.core.headers import BITS, TensorInfo
from dz.errors import Refused
from dz.weights.families import FAMILIES, recognise
from dz.weights.families.recognise import joined


def info(name, dtype, *shape):
    return TensorInfo(name, dtype, shape, 0, (prod(shape) * BITS[dtype] + 7) // 8)


def headers(*rows):
    return {r[0]: info(*r) for r in rows}


def ct(name, **weights):
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": {"weights": weights}}}


QUARK4 = {"weight": {"dtype": "fp4", "scale_format": "e8m0", "group_size": 32}}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# name -> (tensors, quantization_config, family, layout, logical shape of m.weight or m)
CASES = {
    "mxfp4 blocks": (
        [("m_blocks", "U8", 4, 6, 2, 16), ("m_scales", "U8", 4, 6, 2)],
        {"quant_method": "mxfp4"}, "mxfp4", "blocks", (4, 6, 64),
    ),
    "mxfp4 packed": (
        [("m.weight_packed", "U8", 6, 32), ("m.weight_scale", "U8", 6, 2)],
        ct("mxfp4-pack-quantized", group_size=32), "mxfp4", "packed", (6, 64),
    ),
    "mxfp4 beside fp8": (
        [("m.weight", "I8", 6, 32), ("m.scale", "F8_E8M0", 6, 2),
         ("a.weight", "F8_E4M3", 300, 256), ("a.scale", "F8_E8M0", 3, 2)],
        {**BLOCKS, "expert_dtype": "fp4"}, "mxfp4", "weight and scale", (6, 64),
    ),
    "mxfp4 quark": (
        [("m.weight", "U8", 6, 32), ("m.weight_scale", "U8", 6, 2)],
        {"quant_method": "quark", "global_quant_config": QUARK4}, "mxfp4", "weight and weight_scale", (6, 64),
    ),
    "mxfp4 words": (
        [("m.weight", "U32", 6, 8), ("m.scales", "U8", 6, 2)],
        {"mode": "mxfp4"}, "mxfp4", "words", (6, 64),
    ),
    "mxfp8": (
        [("m.weight", "F8_E4M3", 6, 64), ("m.weight_scale", "U8", 6, 2)],
        {"quant_method": "mxfp8"}, "mxfp8", "rows of 32", (6, 64),
    ),
    "fp8 tensor": (
        [("m.weight", "F8_E4M3", 6, 64), ("m.weight_scale", "F32")],
        {"quant_method": "fp8"}, "fp8", "tensor", (6, 64),
    ),
    "fp8 tensor static": (
        [("m.weight", "F8_E4M3", 6, 64), ("m.weight_scale", "F32", 1), ("m.input_scale", "F32", 1)],
        {"quant_method": "fp8", "activation_scheme": "static"}, "fp8", "tensor", (6, 64),
    ),
    "fp8 channel": (
        [("m.weight", "F8_E4M3", 6, 64), ("m.weight_scale", "BF16", 6, 1)],
        ct("float-quantized", strategy="channel", num_bits=8), "fp8", "channel", (6, 64),
    ),
    "fp8 blocks ragged": (
        [("m.weight", "F8_E4M3", 200, 300), ("m.weight_scale_inv", "F32", 2, 3)], BLOCKS, "fp8", "blocks", (200, 300)
    ),
    "fp8 blocks of 64, small": (
        [("m.weight", "F8_E4M3", 50, 130), ("m.weight_scale_inv", "F32", 1, 3)],
        {"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8", "blocks", (50, 130),
    ),
    "fp8 fused experts": (
        [("m.e", "F8_E4M3", 3, 200, 256), ("m.e_scale_inv", "F32", 3, 2, 2)], BLOCKS, "fp8", "blocks", (3, 200, 256)
    ),
    "fp8 a scale for expert and projection": (
        [("m.e", "F8_E4M3", 3, 8, 16), ("m.e_scale", "F32", 3, 2)],
        {"quant_method": "fp8"}, "fp8", "expert and projection", (3, 8, 16),
    ),
    "nvfp4 multiplies": (
        [("m.weight", "U8", 6, 32), ("m.weight_scale", "F8_E4M3", 6, 4), ("m.weight_scale_2", "F32"),
         ("m.input_scale", "F32")],
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", "scale multiplies", (6, 64),
    ),
    "nvfp4 divides": (
        [("m.weight_packed", "U8", 6, 32), ("m.weight_scale", "F8_E4M3", 6, 4), ("m.weight_global_scale", "F32", 1)],
        ct("nvfp4-pack-quantized", group_size=16), "nvfp4", "scale divides", (6, 64),
    ),
    "int4 words": (
        [("m.weight_packed", "I32", 6, 32), ("m.weight_scale", "BF16", 6, 2), ("m.weight_shape", "I64", 2)],
        ct("pack-quantized", num_bits=4, group_size=128, type="int"), "int", "int4 words", (6, 256),
    ),
    "int8 words, one scale a row": (
        [("m.weight_packed", "I32", 6, 32), ("m.weight_scale", "BF16", 6, 1), ("m.weight_shape", "I64", 2)],
        ct("pack-quantized", num_bits=8, strategy="channel", type="int"), "int", "int8 words", (6, 128),
    ),
    "int8 bytes": (
        [("m.weight", "I8", 6, 64), ("m.weight_scale", "F32", 6, 1)],
        ct("int-quantized", num_bits=8, type="int"), "int", "bytes", (6, 64),
    ),
    "awq": (
        [("m.qweight", "I32", 256, 3), ("m.qzeros", "I32", 2, 3), ("m.scales", "F16", 2, 24)],
        {"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", "int4", (24, 256),
    ),
    "gptq": (
        [("m.qweight", "I32", 32, 24), ("m.qzeros", "I32", 2, 3), ("m.scales", "F16", 2, 24), ("m.g_idx", "I32", 256)],
        {"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", "int4", (24, 256),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "quant", "family", "layout", "shape"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("where", ["top", "text_config"])
def test_recognised(rows, quant, family, layout, shape, where):
    tensors = headers(*rows, ("norm.weight", "BF16", 64))
    inner = {"quantization_config": quant}
    found = recognise(tensors, inner if where == "top" else {"text_config": inner})
    mine = next(s for s in found.stored.values() if s.name.startswith("m"))
    assert (mine.family, mine.form.layout, mine.shape) == (family, layout, shape)
    assert found.plain == ("norm.weight",)
    parts = {n for s in found.stored.values() for n in s.parts.values()}
    assert parts | set(found.plain) == set(tensors)
    assert sum(s.bytes for s in found.stored.values()) == sum(t.bytes for n, t in tensors.items() if n in parts)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_believed_undeclared(name):
    with pytest.raises(Refused) as e:
        recognise(headers(*CASES[name][0]), {})
    assert e.value.code == "format_conflict"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("other", CASES)
def test_another_declaration_is_refused_or_says_the_same(name, other):
    """A declaration of another family or layout never passes in silence."""
    rows, _, family, layout, shape = CASES[name]
    try:
        found = recognise(headers(*rows), {"quantization_config": CASES[other][1]})
    except Refused as e:
        assert e.code == "format_conflict"
        return
    mine = next(s for s in found.stored.values() if s.name.startswith("m"))
    assert (mine.family, mine.form.layout, mine.shape) == (family, layout, shape)


@pytest.mark.parametrize(("name", "bits"), [("mxfp4 packed", 4.25), ("mxfp4 blocks", 4.25), ("mxfp8", 8.25)])
def test_bits_a_weight(name, bits):
    rows, quant, family, _, _ = CASES[name]
    (found,) = recognise(headers(*rows), {"quantization_config": quant}).stored.values()
    assert found.bits == bits == FAMILIES[family].bits(quant)


def test_declared_and_not_there():
    with pytest.raises(Refused, match="no fp8 weight"):
        recognise(headers(("a.weight", "BF16", 8, 8)), {"quantization_config": BLOCKS})
    assert recognise({}, {"quantization_config": BLOCKS}).declared[0].family == "fp8"


@pytest.mark.parametrize("lost", ["weight_scale", "weight_packed"])
def test_a_weight_cut_from_its_scales(lost):
    rows, quant, *_ = CASES["mxfp4 packed"]
    two = [("n" + r[0][1:], *r[1:]) for r in rows]
    tensors = headers(*rows, *two)
    del tensors[f"n.{lost}"]
    if lost == "weight_packed":  # scales alone are plain bytes: counted, and coverage will name them
        assert recognise(tensors, {"quantization_config": quant}).plain == ("n.weight_scale",)
        return
    with pytest.raises(Refused, match="without its scales"):
        recognise(tensors, {"quantization_config": quant})


def test_a_block_that_is_not_the_declared_one():
    tensors = headers(("m.weight", "F8_E4M3", 256, 256), ("m.weight_scale_inv", "F32", 4, 4))
    with pytest.raises(Refused, match="one scale for 64 x 64"):
        recognise(tensors, {"quantization_config": BLOCKS})


def test_dynamic_with_a_stored_scale():
    rows = CASES["fp8 tensor static"][0]
    with pytest.raises(Refused, match="stored scale for its activations"):
        recognise(headers(*rows), {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}})


def test_scales_of_no_known_format():
    tensors = headers(("m.weight", "U8", 6, 33), ("m.weight_scale", "U8", 6, 2))
    with pytest.raises(Refused, match="fits no format"):
        recognise(tensors, {"quantization_config": CASES["mxfp4 quark"][1]})


def test_a_second_file_may_declare_it(tmp_path):
    rows = CASES["nvfp4 multiplies"][0]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert recognise(headers(*rows), {}, tmp_path).declared[0].producer == "modelopt"


def test_an_unknown_method_is_said():
    found = recognise(headers(("a.weight", "BF16", 8, 8)), {"quantization_config": {"quant_method": "squish"}})
    assert "squish" in found.notes[0]


def test_names_without_a_role_stay_whole():
    got = joined(headers(("logit_scale", "F32"), ("a.weight", "F32", 2), ("b", "F32", 2)))
    assert [i.name for parts in got.values() for i in parts.values()] == ["logit_scale", "a.weight", "b"]
