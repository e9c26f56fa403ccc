"""What a configuration tells of a model's cache and size, against published shapes worked out by hand."""

import pytest

from dz.inspect.outline import outline
from dz.inspect.outline.keys import Keys

BASE = {"vocab_size": 1000, "hidden_size": 512, "max_position_embeddings": 4096, "num_hidden_layers": 8}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536}
INDEX = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
KDA = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}
KDA["kda_layers"] = [i for i in range(1, 28) if i not in KDA["full_attn_layers"]]
# name -> (configuration, bytes a token in bfloat16, bytes a sequence of recurrent states, layers that keep tokens)
CACHES = {
    "latents and index keys": (
        {**MLA, **INDEX, "num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168},
        (1152 + 132) * 61, 0, 61,
    ),
    "index keys on some layers only": (
        {**MLA, **INDEX, "num_hidden_layers": 4, "num_attention_heads": 64, "hidden_size": 6144,
         "indexer_types": ["full", "shared", "shared", "full"]},
        1152 * 4 + 132 * 2, 0, 4,
    ),
    "delta rule and latents": (
        {**MLA, "q_lora_rank": None, "num_hidden_layers": 27, "num_attention_heads": 32, "hidden_size": 2304,
         "linear_attn_config": KDA},
        7 * 1152, 20 * 32 * 128 * 128 * 4, 7,
    ),
    "grouped heads with raw index keys": (
        {"num_hidden_layers": 60, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
         "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 4, "index_topk_blocks": 16,
         "layer_types": ["full_attention"] * 3 + ["picked_sparse"] * 57},
        60 * 2048 + 57 * 256, 0, 60,
    ),
    "alternate windows": (
        {"num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
         "hidden_size": 2880, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18},
        18 * 2048, 0, 18,
    ),
    "gated delta and grouped heads": (
        {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
         "hidden_size": 2048, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
        12 * 2048, 36 * 32 * 128 * 128 * 4, 12,
    ),
    "pooled keys": (
        {"num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512, "hidden_size": 4096, "q_lora_rank": 1024,
         "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "index_head_dim": 128, "index_n_heads": 64,
         "compress_ratios": [0, 0] + [4, 128] * 20 + [4]},
        21 * (1024 + 256) / 4 + 20 * 8, 0, 41,
    ),
    "mamba2 alone": (
        {"num_hidden_layers": 24, "hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128,
         "expand": 2, "n_groups": 1, "conv_kernel": 4, "max_position_embeddings": None},
        0, 24 * 24 * 64 * 128 * 4, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "token", "state", "layers"), CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("inside", [False, True])
def test_cache(config, token, state, layers, inside):
    raw = {**BASE, **config}
    found = outline({"text_config": raw, "vision_config": {"hidden_size": 9}} if inside else raw)
    keeps = [k for x in found.layers for k in x.mixer.keeps]
    assert found.per_token(2) == pytest.approx(token, rel=1e-9)
    assert sum(k.fixed_bytes for k in keeps if k.kind == "recurrent state") == state
    assert sum(any(k.of_token(2) for k in x.mixer.keeps) for x in found.layers) == layers
    assert not found.guesses


def test_a_window_costs_a_sequence_not_a_token():
    raw = {**BASE, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    windowed = outline({**raw, "layer_types": ["sliding_attention"] * 8, "sliding_window": 100})
    assert windowed.per_token(2) == 0 and windowed.per_sequence(2) == 8 * 100 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(("ranks", "share"), [(1, 1.0), (2, 0.5), (4, 0.25), (16, 0.25)])
def test_heads_are_shared_as_far_as_they_go(ranks, share):
    (keep,) = outline({**BASE, "num_attention_heads": 16, "num_key_value_heads": 4}).layers[0].mixer.keeps
    assert keep.share(ranks) == share


def test_a_latent_is_whole_on_every_rank():
    keep = outline({**BASE, **MLA, "num_attention_heads": 16}).layers[0].mixer.keeps[0]
    assert keep.share(8) == 1.0


def test_the_shape_of_two_point_eight_trillion(giant):
    """Parameters and cache of the largest shape that is known, from its configuration alone."""
    found = outline(giant.trillion_config())
    assert found.experts == 92 * 896 * 33_030_144
    assert found.layers[1].mixer.parameters / 1e6 == pytest.approx(443.7, rel=1e-3)
    assert found.layers[3].mixer.parameters / 1e6 == pytest.approx(232.2, rel=1e-3)
    assert found.layers[1].forward.dense / 1e6 == pytest.approx(189.9, rel=1e-3)
    assert (found.parameters - found.experts) * 2 / 1e9 == pytest.approx(113.5, rel=1e-3)
    assert found.per_token(2) == 24 * 1152
    assert found.per_sequence(2) / 1e6 == pytest.approx(434 + 15.3, rel=1e-3)
    assert found.residuals == 9


# upstream's own count of default-sized or stated models, in parameters
KNOWN = {
    "dense, grouped heads": (
        {"vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288},
        8.19e9,
    ),
    "latents and 256 experts": (
        {**MLA, **INDEX, "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
         "num_attention_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
         "moe_intermediate_size": 2048, "intermediate_size": 18432, "first_k_dense_replace": 3},
        671e9,
    ),
    "gated delta and 512 experts": (
        {**CACHES["gated delta and grouped heads"][0], "vocab_size": 151936, "num_experts": 512,
         "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        80e9,
    ),
    "windows and 128 experts": (
        {**CACHES["alternate windows"][0], "vocab_size": 201088, "num_local_experts": 128, "num_experts_per_tok": 4,
         "intermediate_size": 2880},
        117e9,
    ),
    "delta rule and 256 experts": (
        {**CACHES["delta rule and latents"][0], "vocab_size": 163840, "num_experts": 256, "num_experts_per_token": 8,
         "num_shared_experts": 1, "moe_intermediate_size": 1024, "intermediate_size": 9216,
         "first_k_dense_replace": 1},
        48e9,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "parameters"), KNOWN.values(), ids=KNOWN)
def test_parameters_within_the_band(config, parameters):
    assert outline({**BASE, **config}).parameters == pytest.approx(parameters, rel=0.03)


def test_what_is_left_open_is_said():
    assert any("squiggle" in g for g in outline({**BASE, "layer_types": ["squiggle"] * 8}).guesses)
    assert any("vocab_size" in g for g in outline({"hidden_size": 8, "num_hidden_layers": 1}).guesses)


def test_keys_never_come_from_what_sees():
    keys = Keys({"vision_config": {"hidden_size": 1, "num_hidden_layers": 2}, "hidden_size": 7})
    assert keys.number("hidden_size") == 7 and keys.number("num_hidden_layers") == 0
