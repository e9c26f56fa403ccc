"""Upstream's model on meta: parameters without numbers, computed buffers with them, its parts found."""

import json

import pytest
import torch

from dz.errors import Refused, UsageError
from dz.upstream.build import build_meta, dtype_of

NAMES = ["llama", "gpt_oss", "deepseek_v4", "qwen3_next", "mamba2", "lfm2", "longrope", "qwen3_vl", "gemma3", "llava"]


@pytest.fixture(params=NAMES)
def model(request, tiny, tmp_path):
    folder = tiny.build(request.param, tmp_path / request.param)
    return request.param, folder, build_meta(tiny.source(folder), trust=False, dtype=torch.float32)


def test_parameters_have_no_numbers_and_buffers_have(model, tiny):
    """Buffers that no checkpoint holds are upstream's, value by value; everything else waits on meta."""
    _, folder, built = model
    want = dict(tiny.upstream(folder).named_buffers())
    assert {p.device.type for p in built.model.parameters()} == {"meta"}
    assert not any(p.requires_grad for p in built.model.parameters())
    assert not built.model.training
    kept = set(built.model.state_dict())
    for name, b in built.model.named_buffers():
        if name not in kept:
            assert torch.equal(b, want[name]), name
        assert (b.shape, b.dtype) == (want[name].shape, want[name].dtype), name


def test_the_parts(model, tiny):
    name, _, built = model
    spec = tiny.MODELS[name]
    text = spec.config.get("text_config", spec.config)
    assert built.cls == spec.cls
    assert len(built.layers) == text["num_hidden_layers"]
    assert len({type(x) for x in built.layers}) == 1
    assert built.text_config.vocab_size == tiny.VOCAB
    assert built.vision == spec.vision
    inside = list(built.decoder.modules())
    assert all(any(x is m for m in inside) for x in built.layers)
    if spec.vision:
        tower = [n for n, _ in built.model.named_modules() if "vision" in n or "visual" in n]
        assert tower
        assert not any(built.model.get_submodule(n) in inside for n in tower)


@pytest.mark.parametrize(
    "cls, changes, decoder, layers",
    [
        ("OPTForCausalLM", {"ffn_dim": 16}, "OPTDecoder", 2),  # one module further in than the base model
        ("BertLMHeadModel", {"intermediate_size": 16, "is_decoder": True}, "BertModel", 2),  # layers in a part of it
        (
            "ModernBertDecoderForCausalLM",
            {"intermediate_size": 16},
            "ModernBertDecoderModel",
            2,
        ),  # `decoder` is its head
        ("GPT2LMHeadModel", {"n_embd": 16, "n_head": 2, "n_layer": 2}, "GPT2Model", 2),
    ],
)
def test_the_decoder_is_what_takes_tokens(tiny, tmp_path, cls, changes, decoder, layers):
    import transformers

    shared = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = getattr(transformers, cls).config_class(**shared, **ids, **changes, architectures=[cls])
    config.save_pretrained(tmp_path)
    built = build_meta(tiny.source(tmp_path), trust=False)
    assert (type(built.decoder).__name__, len(built.layers)) == (decoder, layers)


def test_nothing_global_is_left_changed(tiny, tmp_path):
    register = torch.nn.Module.register_parameter
    build_meta(tiny.source(tiny.build("llama", tmp_path / "a")), trust=False)
    assert torch.nn.Module.register_parameter is register
    assert torch.empty(2).device.type == "cpu"
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
    folder = tiny.build("llama", tmp_path / "b")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "no_such_function"}))
    with pytest.raises(Refused) as e:
        build_meta(tiny.source(folder), trust=False)
    assert e.value.code in ("not_built", "bad_config")
    assert "no_such_function" in e.value.why
    assert torch.nn.Module.register_parameter is register


@pytest.mark.parametrize(
    "name, want", [("float32", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)]
)
def test_dtypes(name, want):
    assert dtype_of(name) == want


def test_a_dtype_that_is_none():
    with pytest.raises(UsageError, match="int8"):
        dtype_of("int8")
