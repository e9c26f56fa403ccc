"""Field failures R14 to R20: what a config.json says, and what a reader of it once made of that."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch

from dz.core.registry import Registry
from dz.errors import Refused
from dz.inspect import quantised, scaling
from dz.inspect.survey import survey
from dz.upstream import settled
from dz.upstream.build import build_meta
from dz.upstream.decoder import Decoder
from dz.upstream.footprint import footprint

MLA = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def build(tiny, folder, config):
    return build_meta(tiny.source(tiny.write(folder, config, weights=False)), trust=False)


def inventory(tiny, folder, config, registry):
    source = tiny.source(tiny.write(folder, config, weights=False))
    return survey(build_meta(source, trust=False), source, {}, registry=registry, raw=config)


# -- R14: the quantisation inside the language model's configuration


def test_r14_quantisation_is_found_wherever_it_stands():
    quant = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    top, inner = {"quantization_config": quant}, {"text_config": {"quantization_config": quant, "num_hidden_layers": 2}}
    assert settled.check(top) == ("quantised by compressed-tensors, as quantization_config says",)
    assert settled.check(inner) == ("quantised by compressed-tensors, as text_config.quantization_config says",)
    both = "quantised by compressed-tensors, as quantization_config and text_config.quantization_config says"
    assert settled.check({**top, **inner}) == (both,)
    assert settled.check({"quantization_config": None, "text_config": {}}) == ()


def test_r14_two_quantisations_that_differ_are_refused():
    raw = {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "text_config": {"quantization_config": {"quant_method": "mxfp4"}},
    }
    with pytest.raises(Refused) as refused:
        settled.check(raw)
    assert "quantization_config and text_config.quantization_config disagree about quant_method" in refused.value.what
    assert refused.value.code == "two_quantisations"


def test_r14_the_inventory_says_it(tiny, tmp_path, registry):
    config = {**tiny.LLAMA, "quantization_config": {"quant_method": "newcomer"}}
    assert "quantised by newcomer, as quantization_config says" in inventory(tiny, tmp_path, config, registry).notes


# -- R15: the base of the rotary angles, written four ways


def frequencies(built):
    rope = built.decoder.rotary_emb
    return {n: b.clone() for n, b in rope.named_buffers() if n.endswith("inv_freq")}


def test_r15_four_spellings_give_the_same_angles(tiny, tmp_path):
    base = {k: v for k, v in tiny.LLAMA.items() if k != "rope_theta"}
    scaled = {"factor": 4.0, "rope_theta": 5e5}
    ways = [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", **scaled}},
        {"rope_parameters": {"rope_type": "linear", **scaled}},
    ]
    found = [build(tiny, tmp_path / str(i), {**base, **way}) for i, way in enumerate(ways)]
    want = 5e5 ** -(torch.arange(0, 8, 2).double() / 8) / 4
    for built in found:
        torch.testing.assert_close(frequencies(built)["inv_freq"].double(), want, rtol=1e-6, atol=0)
        assert not built.notes


def test_r15_a_base_for_each_kind_of_layer(tiny, tmp_path):
    each = {
        "full_attention": {"rope_type": "default", "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    nested = build(tiny, tmp_path / "nested", {**tiny.GEMMA, "rope_parameters": each})
    flat = build(tiny, tmp_path / "flat", {**tiny.GEMMA, "rope_theta": 2e6, "rope_local_base_freq": 3e4})
    assert not nested.notes
    a, b = frequencies(nested), frequencies(flat)
    assert set(a) == set(b)
    assert len(a) >= 2
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_r15_a_base_that_is_missing_is_said(tiny, tmp_path, registry):
    config = {k: v for k, v in tiny.LLAMA.items() if "rope" not in k}
    (line,) = [n for n in inventory(tiny, tmp_path, config, registry).notes if "rope_theta" in n]
    assert line == "rope_theta defaulted to 10000: rope_parameters does not give it"


# -- R16: YaRN's two corrections


def test_r16_the_two_factors():
    yarn = {"rope_type": "yarn", "factor": 40.0}
    assert scaling.factors({**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}).softmax == pytest.approx(1.8739, abs=5e-5)
    assert scaling.factors({**yarn, "mscale": 0.707, "mscale_all_dim": 0.707}).softmax == pytest.approx(
        1.5896, abs=5e-5
    )
    assert scaling.factors({**yarn, "mscale": 0.707, "mscale_all_dim": 0.707}).angles == 1.0
    assert scaling.factors(yarn) == scaling.Factors(0.1 * math.log(40) + 1, 1.0)
    both = scaling.factors({**yarn, "mscale": 1.0, "mscale_all_dim": 0.707})
    assert both.angles == pytest.approx((0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1))
    assert scaling.factors({**yarn, "factor": 0.5}) == scaling.Factors(1.0, 1.0)
    assert scaling.factors({**yarn, "attention_factor": 1.25}).angles == 1.25
    assert scaling.factors({"rope_type": "linear", "factor": 4.0}) is None


def yarn_angles(positions, *, base=10000.0, dim=8, factor=40.0, original=128, fast=32, slow=1):
    """arXiv:2309.00071, written out pair by pair: interpolated below, as they are above, a ramp between."""

    def turns(n):
        return dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(turns(fast)), 0), min(math.ceil(turns(slow)), dim - 1)
    out = []
    for i in range(dim // 2):
        plain = base ** (-2 * i / dim)
        ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        out.append(plain / factor * ramp + plain * (1 - ramp))
    return positions[:, None].double() * torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize(("one", "all_dims"), [(1.0, 1.0), (0.707, 0.707), (1.0, 0.707), (None, None)])
def test_r16_upstream_applies_them_as_asked(tiny, tmp_path, registry, one, all_dims):
    given = {k: v for k, v in (("mscale", one), ("mscale_all_dim", all_dims)) if v is not None}
    config = {**MLA, "rope_theta": 10000.0, "rope_scaling": {**YARN, **given}}
    built = build(tiny, tmp_path, config)
    asked = scaling.factors({**YARN, **given})
    at = torch.tensor([0, 1, 63])
    cos, sin = built.decoder.rotary_emb(torch.zeros(1, 3, 8), at[None])
    angles = yarn_angles(at)
    torch.testing.assert_close(cos[0, :, :4].double(), angles.cos() * asked.angles, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sin[0, :, :4].double(), angles.sin() * asked.angles, atol=1e-5, rtol=1e-5)
    assert built.layers[0].self_attn.scaling == pytest.approx(20**-0.5 * asked.softmax)
    (line,) = [n for n in scaling.notes(built) if n.startswith("yarn")]
    assert " but " not in line


def test_r16_a_lost_or_swapped_factor_is_named(tiny, tmp_path):
    config = {**MLA, "rope_theta": 10000.0, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
    built = build(tiny, tmp_path, config)
    built.decoder.rotary_emb.attention_scaling = 1.3689
    built.layers[0].self_attn.scaling = 20**-0.5
    (line,) = scaling.notes(built)
    assert "but rotary_emb multiplies them by 1.3689; layers.0.self_attn multiplies it by 1" in line


# -- R17: an explicit list against an interval

HYBRID = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "torch_dtype": "float32",
    "rope_theta": 1e4,
}
IRREGULAR = ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]


def test_r17_the_list_wins_over_the_interval(tiny, tmp_path, registry):
    found = inventory(tiny, tmp_path, {**HYBRID, "layer_types": IRREGULAR, "full_attention_interval": 4}, registry)
    assert "layer_types says otherwise than full_attention_interval 4: the list is followed" in found.notes
    layers = {s.mixer.state: s.mixer.layers for s in found.sites if s.mixer}
    assert layers == {"kv": (1, 3), "recurrent": (0, 2, 4)}


def test_r17_a_list_of_another_length_is_refused(tiny, tmp_path):
    with pytest.raises(Refused, match="layer_types has 4 entries for 5 layers"):
        build(tiny, tmp_path, {**HYBRID, "layer_types": IRREGULAR[:4]})
    settled.check({"num_hidden_layers": 4, "layer_types": IRREGULAR, "num_nextn_predict_layers": 1})


def test_r17_a_class_that_flattens_the_list_is_refused():
    class Flat:
        layer_types = ("a", "a", "a", "b", "a")

    raw = {"num_hidden_layers": 5, "layer_types": IRREGULAR, "rope_theta": 1.0}
    with pytest.raises(Refused, match="Flat does not follow layer_types"):
        settled.followed(raw, Flat())
    Flat.layer_types = ("l", "f", "l", "f", "l")  # kinds by other names, in the same places
    assert settled.followed(raw, Flat()) == ()
    Flat.layer_types = ("l", "l", "l")  # attention and feed-forward counted as one layer
    assert settled.followed(raw, Flat()) == ("layer_types lists 5 blocks, which are 3 layers to the class",)


# -- R18: other heads on other layers

HEADS = {
    "model_type": "laguna",
    "architectures": ["LagunaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_attention_heads_per_layer": [6, 4, 4, 6],
    "sliding_window": 6,
    "mlp_layer_types": ["dense"] * 4,
    "torch_dtype": "float32",
    "gating": "per-head",
    "max_position_embeddings": 64,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


def test_r18_shapes_and_cache_sizes_by_layer(tiny, tmp_path, registry):
    built = build(tiny, tmp_path / "a", HEADS)
    found = inventory(tiny, tmp_path / "b", HEADS, registry)
    shapes = {s.id: s.shapes["weight"] for s in found.sites if s.shapes and s.cls == "Linear"}
    for name, rows in (("q_proj", 8), ("g_proj", 1)):
        mine = {k: v for k, v in shapes.items() if k.endswith(f"self_attn.{name}")}
        assert mine == {
            f"model.layers.{{0,3}}.self_attn.{name}": (6 * rows, 32),
            f"model.layers.{{1,2}}.self_attn.{name}": (4 * rows, 32),
        }
    heads = {s.mixer.layers: (s.traits["heads"], s.traits["kv_heads"]) for s in found.sites if s.mixer}
    assert heads == {(0, 3): (6, 2), (1, 2): (4, 2)}
    held = footprint(built, Decoder(built))
    assert held.per_token == 4 * 2 * 2 * 8 * 4  # layers, keys and values, key heads, channels, bytes
    with pytest.raises(Refused, match="num_attention_heads_per_layer has 3 entries for 4 layers"):
        settled.check({**HEADS, "num_attention_heads_per_layer": [6, 4, 4]})


# -- R19: what a quantisation leaves as it is

IGNORE = ["re:.*\\.self_attn\\..*", "*.shared_expert.*", "lm_head"]


def packed(quantised_modules, plain_modules):
    """Headers of a checkpoint: MXFP4 in the compressed-tensors layout, and bfloat16."""
    from dz.core.headers import TensorInfo

    rows = {}
    for name in quantised_modules:
        rows[f"{name}.weight_packed"] = ("U8", (8, 32))
        rows[f"{name}.weight_scale"] = ("U8", (8, 2))
    for name in plain_modules:
        rows[f"{name}.weight"] = ("BF16", (8, 64))
    sizes = {"U8": 1, "BF16": 2}
    out, at = {}, 0
    for name, (dtype, shape) in rows.items():
        end = at + math.prod(shape) * sizes[dtype]
        out[name] = TensorInfo(name=name, dtype=dtype, shape=shape, begin=at, end=end)
        at = end
    return out


def quant(ignore):
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}}
    head = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ignore}
    return {"quantization_config": {**head, "config_groups": {"group_0": group}}}


EXPERTS = [f"model.layers.{i}.mlp.experts.{e}.w1" for i in range(2) for e in range(3)]
PLAIN = [f"model.layers.{i}.{n}" for i in range(2) for n in ("self_attn.q_proj", "mlp.shared_expert.up_proj")]


def test_r19_every_module_has_its_flag():
    found = quantised.flags(quant(IGNORE), packed(EXPERTS, [*PLAIN, "lm_head"]), {})
    assert {f.module for f in found if f.quantised} == set(EXPERTS)
    assert {f.module: f.pattern for f in found if not f.quantised} == {
        "model.layers.0.self_attn.q_proj": IGNORE[0],
        "model.layers.1.self_attn.q_proj": IGNORE[0],
        "model.layers.0.mlp.shared_expert.up_proj": IGNORE[1],
        "model.layers.1.mlp.shared_expert.up_proj": IGNORE[1],
        "lm_head": "lm_head",
    }
    assert quantised.by_glob(found) == {
        "model.layers.*.mlp.experts.*.w1": "quantised",
        "model.layers.*.self_attn.q_proj": f"as it is ({IGNORE[0]})",
        "model.layers.*.mlp.shared_expert.up_proj": f"as it is ({IGNORE[1]})",
        "lm_head": "as it is (lm_head)",
    }


def test_r19_a_pattern_that_means_nothing_is_refused():
    headers = packed(EXPERTS, [*PLAIN, "lm_head"])
    for idle in ("language_model.lm_head", "re:.*vision.*", "*.shared_experts.*"):
        with pytest.raises(Refused) as refused:
            quantised.flags(quant([*IGNORE, idle]), headers, {})
        assert repr(idle) in refused.value.what
    # the name in the model counts as well as the name in the files
    renamed = {"lm_head.weight": "language_model.lm_head.weight"}
    quantised.flags(quant([*IGNORE[:2], "language_model.lm_head"]), headers, renamed)
    quantised.flags(quant([*IGNORE, "visual.patch"]), headers, {}, ["visual.patch.proj"])


def test_r19_flag_and_dtype_must_agree():
    with pytest.raises(Refused) as refused:
        quantised.flags(quant(["*.mlp.*", "lm_head"]), packed(EXPERTS, ["lm_head"]), {})
    assert refused.value.code == "ignored_but_quantised"
    odd_one_out = packed(EXPERTS[:5], [*PLAIN, "lm_head", EXPERTS[5]])
    with pytest.raises(Refused) as refused:
        quantised.flags(quant(IGNORE), odd_one_out, {})
    assert (refused.value.code, EXPERTS[5] in refused.value.why) == ("plain_but_not_ignored", True)
    quantised.flags(quant([*IGNORE, EXPERTS[5]]), odd_one_out, {})


def test_r19_patterns_are_words_globs_and_expressions():
    assert quantised.matches("mlp.gate", "model.layers.3.mlp.gate")
    assert quantised.matches("mlp.gate", "model.layers.3.mlp.gate.inner")
    assert not quantised.matches("mlp.gate", "model.layers.3.mlp.gate_proj")
    assert quantised.matches("model.layers.*.self_attn", "model.layers.0.self_attn.q_proj")
    assert quantised.matches("re:model.*q$", "model.a.q")
    assert not quantised.matches("re:q$", "model.a.q")  # an expression holds from the beginning
    with pytest.raises(Refused, match="no regular expression"):
        quantised.matches("re:(", "x")


def test_r19_the_inventory_prints_them(tiny, tmp_path, registry, capsys):
    from dz.cli import main

    folder = tiny.write(tmp_path / "m", {**tiny.LLAMA, **quant(["re:.*self_attn.*", "lm_head", "embed_tokens"])})
    names = {n for n in tiny.headers(folder) if "mlp" not in n}
    headers = tiny.headers(folder)
    rows, blob = {}, b""
    for n in sorted(names):
        size = headers[n].bytes
        rows[n] = {
            "dtype": headers[n].dtype,
            "shape": list(headers[n].shape),
            "data_offsets": [len(blob), len(blob) + size],
        }
        blob += bytes(size)
    for n in sorted(set(headers) - names):
        out, inner = headers[n].shape
        padded = -(-inner // 32) * 32
        for leaf, shape in (("weight_packed", [out, padded // 2]), ("weight_scale", [out, padded // 32])):
            size = shape[0] * shape[1]
            name = n.replace("weight", leaf)
            rows[name] = {"dtype": "U8", "shape": shape, "data_offsets": [len(blob), len(blob) + size]}
            blob += bytes(size)
    text = json.dumps(rows).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + blob)
    main.main(["adapt", str(folder), "--dry-run", "--device", "cpu"])
    said = capsys.readouterr()
    assert "model.layers.*.self_attn.q_proj: as it is (re:.*self_attn.*)" in said.err
    assert "model.layers.*.mlp.up_proj: quantised" in said.err


# -- R20: a choice of keys that layers share

SHARED = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    **{k: v for k, v in MLA.items() if k not in ("model_type", "architectures")},
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "indexer_types": ["full", "shared", "shared", "full"],
    "rope_theta": 1e4,
    "mlp_layer_types": ["dense"] * 4,
}


def test_r20_shared_layers_own_no_indexer_and_use_the_choice_before_them(tiny, tmp_path, registry):
    found = inventory(tiny, tmp_path / "i", SHARED, registry)
    owners = {m.split(".")[2] for s in found.sites for m in s.members if ".indexer" in m and s.parameters}
    assert owners == {"0", "3"}
    built = build(tiny, tmp_path / "b", SHARED)
    model = type(built.model)._from_config(built.config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2)
    taken, made = {}, {}

    def watch(i):
        def hook(module, args, kwargs, result):
            taken[i], made[i] = kwargs.get("prev_topk_indices"), result[-1] if isinstance(result, tuple) else None

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(watch(i), with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(1, 18)[None])
    first = made[0]
    assert first.shape[-1] == 4  # fewer than the 17 positions: a wrong choice would show
    assert torch.equal(taken[1], first)
    assert torch.equal(taken[2], first)
    assert not torch.equal(made[3], first)


def test_r20_a_first_layer_that_shares_is_refused(tiny, tmp_path):
    with pytest.raises(Refused, match="indexer_types begins with 'shared'"):
        build(tiny, tmp_path, {**SHARED, "indexer_types": ["shared", "full", "shared", "full"]})
    with pytest.raises(Refused, match=r"text_config\.indexer_types begins with 'shared'"):
        settled.check({"text_config": {"num_hidden_layers": 2, "indexer_types": ["shared", "full"]}})
