"""The estimate from a configuration against upstream's own classes, counted on meta at their default sizes."""

import pytest
import torch

from dz.adapt.fit.estimate import estimate
from dz.inspect.outline import outline

TYPES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "olmo2",
    "lfm2",
    "mamba2",
    "kimi_linear",
    "mamba",
    "gpt_neox",
    "gemma3n_text",
)


@pytest.mark.parametrize("kind", TYPES)
def test_a_default_model_lies_within_its_band(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    own = sum({id(p): p.numel() for p in model.parameters()}.values())
    raw = config.to_dict()
    book, band, _ = estimate(raw, outline(raw))
    assert abs(book.values() - own) <= band * own
    assert band <= 0.15


def test_without_sizes_there_is_no_estimate():
    raw = {"num_attention_heads": 4}
    _, band, why = estimate(raw, outline(raw))
    assert band == 1.0 and why.startswith("no estimate") and "hidden_size" in why
