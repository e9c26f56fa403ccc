"""A model on meta, read into an inventory: nothing unaccounted, mixers and their tiers, plain refusals to guess."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dz.core.envelope import envelope, validate
from dz.core.registry import Registry
from dz.inspect import groups
from dz.inspect.survey import survey
from dz.upstream.build import build_meta


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def look(tiny, folder, registry, headers=None, trust=False):
    source = tiny.source(folder)
    built = build_meta(source, trust=trust)
    return survey(built, source, tiny.headers(folder) if headers is None else headers, registry=registry)


def test_everything_of_a_plain_decoder_is_known_and_accounted_for(tiny, tmp_path, registry):
    folder = tiny.write(tmp_path / "m", tiny.LLAMA)
    found = look(tiny, folder, registry)
    assert (found.count("variant"), found.count("unknown"), found.notes) == (0, 0, ())
    assert found.coverage.complete
    held = load_file(folder / "model.safetensors")
    assert found.parameters == sum(t.numel() for t in held.values())
    assert sum(s.bytes for s in found.sites) == found.bytes == sum(t.numel() * 4 for t in held.values())
    assert {s.op for s in found.sites} == {
        "embedding",
        "linear",
        "rms_norm",
        "attention",
        "gated_activation",
        "lm_head",
        "rope",
    }
    norm = next(s for s in found.sites if s.id == "model.layers.*.input_layernorm")
    assert (len(norm.members), norm.parameters, norm.traits["eps"], norm.shapes) == (3, 120, 1e-5, {"weight": (40,)})
    validate(envelope("inventory", found))


def test_tied_weights_count_once(tiny, tmp_path, registry):
    folder = tiny.write(tmp_path / "m", {**tiny.LLAMA, "tie_word_embeddings": True})
    found = look(tiny, folder, registry)
    head = next(s for s in found.sites if s.op == "lm_head")
    assert (head.parameters, head.bytes, head.traits["tied"], found.notes) == (0, 0, ["weight"], ())


def test_layers_that_differ_are_sites_of_their_own(tiny, tmp_path, registry):
    found = look(tiny, tiny.write(tmp_path / "m", tiny.GEMMA), registry)
    attention = {s.id: s for s in found.sites if s.op == "attention"}
    assert set(attention) == {"model.layers.{0,2}.self_attn", "model.layers.{1}.self_attn"}
    assert attention["model.layers.{0,2}.self_attn"].traits["window"] == 6
    assert attention["model.layers.{1}.self_attn"].traits["window"] is None
    assert attention["model.layers.{0,2}.self_attn"].mixer.layers == (0, 2)
    assert {s.traits["offset"] for s in found.sites if s.op == "rms_norm"} == {1.0}
    scale = next(s for s in found.sites if s.op == "embedding").traits["scale"]
    assert scale == pytest.approx(40**0.5)


def test_mixers_of_a_hybrid(tiny, tmp_path, registry):
    found = look(tiny, tiny.write(tmp_path / "m", tiny.HYBRID), registry)
    mixers = {s.mixer.kind: s for s in found.sites if s.mixer}
    assert set(mixers) == {"convolution", "attention"}
    conv, attention = mixers["convolution"], mixers["attention"]
    assert (conv.mixer.state, conv.mixer.tiers, conv.mixer.layers) == ("recurrent", ("isolate",), (0, 2))
    assert (attention.mixer.state, attention.mixer.tiers) == ("kv", ("isolate", "gather"))
    assert conv.status == "unknown"
    assert "no op has this structure" in conv.reason


def test_a_renamed_tensor_is_named_on_both_sides(tiny, tmp_path, registry):
    folder = tiny.write(tmp_path / "m", tiny.LLAMA)
    held = load_file(folder / "model.safetensors")
    held["model.layers.1.mlp.uq_proj.weight"] = held.pop("model.layers.1.mlp.up_proj.weight")
    save_file(held, folder / "model.safetensors")
    found = look(tiny, folder, registry)
    assert found.coverage.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert found.coverage.unexpected == ("model.layers.1.mlp.uq_proj.weight",)
    up = next(s for s in found.sites if s.id == "model.layers.*.mlp.up_proj")
    assert up.bytes == 2 * 56 * 40 * 4


def test_without_weight_files_the_class_alone_is_read(tiny, tmp_path, registry):
    found = look(tiny, tiny.write(tmp_path / "m", tiny.LLAMA, weights=False), registry, headers={})
    assert found.parameters > 0
    assert found.bytes == 0
    assert any("no weight files" in n for n in found.notes)


CODE = '''
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

class StrangeConfig(LlamaConfig):
    model_type = "strange"

def blend(x, weight):
    return torch.einsum("btd,de->bte", x, weight).softmax(-1)

class Blender(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.hidden_size, config.hidden_size))

    def forward(self, x):
        return blend(x, self.weight)

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

class Careless(nn.Module):
    """Attends, but has no place for a cache."""
    def __init__(self, config):
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = self.qkv(hidden_states).chunk(3, -1)
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return attend(self, q[:, None], k[:, None], v[:, None], attention_mask)[0][:, :, 0]

class StrangeForCausalLM(LlamaForCausalLM):
    config_class = StrangeConfig
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].mlp = Blender(config)
        self.model.layers[2].extra = Careless(config)
'''


def test_strange_code_is_unknown_and_what_cannot_be_isolated_is_said(tiny, tmp_path, registry):
    folder = tmp_path / "strange"
    auto = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.StrangeForCausalLM"}
    tiny.write(
        folder,
        {**tiny.LLAMA, "model_type": "strange", "architectures": ["StrangeForCausalLM"], "auto_map": auto},
        weights=False,
    )
    (folder / "strange.py").write_text(CODE)
    found = look(tiny, folder, registry, headers={}, trust=True)
    assert found.runs == "repository"
    blender = next(s for s in found.sites if s.cls == "Blender")
    assert (blender.status, blender.op, blender.parameters) == ("unknown", None, 1600)
    function = next(s for s in found.sites if s.cls == "blend")
    assert (function.kind, function.status, function.members) == ("function", "unknown", ("model.layers.1.mlp",))
    assert "einsum" in function.reason
    assert any("model.layers.2.extra attends but takes no cache argument" in n for n in found.notes)
    json.dumps(envelope("inventory", found))


def test_ids_are_unique_and_name_layers():
    globs = ["a.*.b", "a.*.b", "c", "a.*.b"]
    members = [["a.0.b", "a.2.b"], ["a.1.b"], ["c"], [f"a.{i}.b" for i in range(3, 40)]]
    assert groups.ids(globs, members) == ["a.{0,2}.b", "a.{1}.b", "c", "a.{3,4,5,6,7,8,...,39}.b"]
    assert groups.ids(["x", "x"], [["x"], ["x"]]) == ["x#1", "x#2"]
    assert groups.glob_of("model.layers.10.experts.3.w1") == "model.layers.*.experts.*.w1"


def test_groups_split_on_attributes_that_may_steer_a_forward():
    def layer(i, window):
        m = torch.nn.Linear(2, 2)
        m.layer_idx, m.window = i, window
        return f"layers.{i}", m

    found = groups.group([layer(0, 4), layer(1, None), layer(2, 4)])
    assert [g.members for g in found] == [["layers.0", "layers.2"], ["layers.1"]]
