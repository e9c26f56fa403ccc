"""A model repository as one wrote it for transformers 4.3x: its own code, on the weights of an installed class.

`write(folder)` makes a checkpoint of the installed class beside code that computes the same with what 4.x offered: mask
helpers, `get_usable_length`, `seen_tokens`, caches as tuples, `rope_scaling` that is None, a list of tied weights, a
base class that can generate, buffers that no checkpoint holds. Tests get this module as the fixture `old_style`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGURATION = """
from transformers.configuration_utils import PretrainedConfig
from transformers.onnx import OnnxConfig


class OldExport(OnnxConfig):
    pass


class OldConfig(PretrainedConfig):
    model_type = "old_style"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-6, rope_theta=10000.0,
                 rope_scaling=None, use_cache=True, tie_word_embeddings=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
"""
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.import_utils import is_torch_fx_available

from .configuration_old import OldConfig

if is_torch_fx_available():
    _prepare_4d_causal_attention_mask = torch.fx.wrap(_prepare_4d_causal_attention_mask)


class OldNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OldRope(nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), -1)
        return both.cos()[:, None], both.sin()[:, None]


def turn(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class OldAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        if self.config.rope_scaling is None:
            self.rotary = OldRope(self.head_dim, config.rope_theta)
        else:
            raise ValueError("scaling " + self.config.rope_scaling["type"])

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None):
        batch, length, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(batch, length, self.heads, -1).transpose(1, 2)
        k = self.k_proj(hidden_states).view(batch, length, self.groups, -1).transpose(1, 2)
        v = self.v_proj(hidden_states).view(batch, length, self.groups, -1).transpose(1, 2)
        total = length
        if past_key_value is not None:
            total += past_key_value.get_usable_length(length, self.layer_idx)
        cos, sin = self.rotary(position_ids)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        if past_key_value is not None:
            k, v = past_key_value.update(k, v, self.layer_idx)
        if k.shape[2] != total:
            raise ValueError(f"{k.shape[2]} keys, {total} were expected")
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5 + attention_mask
        out = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class OldMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OldLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = OldAttention(config, layer_idx)
        self.mlp = OldMLP(config)
        self.input_layernorm = OldNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = OldNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None):
        mixed = self.self_attn(self.input_layernorm(hidden_states), attention_mask=attention_mask,
                               position_ids=position_ids, past_key_value=past_key_value)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class OldPreTrainedModel(PreTrainedModel):
    config_class = OldConfig
    base_model_prefix = "model"
    _supports_cache_class = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.02)


class OldModel(OldPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([OldLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = OldNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                return_dict=None):
        use_cache = use_cache if use_cache is not None else self.config.use_cache
        legacy = use_cache and not isinstance(past_key_values, Cache)
        if legacy:
            past_key_values = DynamicCache.from_legacy_cache(past_key_values)
        batch, length = input_ids.shape
        past = past_key_values.get_usable_length(length) if use_cache else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=input_ids.device)[None]
        hidden_states = self.embed_tokens(input_ids)
        mask = _prepare_4d_causal_attention_mask(attention_mask, (batch, length), hidden_states, past)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask, position_ids=position_ids,
                                  past_key_value=past_key_values if use_cache else None)
        held = past_key_values if use_cache else None
        if legacy:
            held = held.to_legacy_cache()
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=held)


class OldForCausalLM(OldPreTrainedModel):
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.model = OldModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                return_dict=None):
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                         past_key_values=past_key_values, use_cache=use_cache)
        return CausalLMOutputWithPast(logits=self.lm_head(out[0]), past_key_values=out.past_key_values)

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        if past_key_values is not None:
            if past_key_values.get_max_length() is not None:
                raise ValueError("a growing cache has no bound")
            input_ids = input_ids[:, past_key_values.seen_tokens :]
        position_ids = attention_mask.long().cumsum(-1) - 1
        position_ids.masked_fill_(attention_mask == 0, 1)
        return {"input_ids": input_ids, "position_ids": position_ids[:, -input_ids.shape[1] :],
                "past_key_values": past_key_values, "use_cache": kwargs.get("use_cache"),
                "attention_mask": attention_mask}
"""


def write(tiny: Any, folder: Path, *, model: str = MODEL, configuration: str = CONFIGURATION, **changes: Any) -> Path:
    """The repository in `folder`. `changes` are keys of config.json; the twin is the folder without `auto_map`."""
    tiny.build("llama", folder, attention_bias=False, mlp_bias=False, **changes)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {"model_type": "old_style", "architectures": ["OldForCausalLM"], "rope_theta": 10000.0}
    config["auto_map"] = {"AutoConfig": "configuration_old.OldConfig"}
    config["auto_map"]["AutoModelForCausalLM"] = "modeling_old.OldForCausalLM"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_old.py").write_text(configuration)
    (folder / "modeling_old.py").write_text(model)
    return folder
