"""A model that no library knows: delta-rule and latent attention, latent experts, mixed residuals."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel

from .configuration_never_seen import NeverSeenConfig


class Norm(nn.Module):
    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states.to(input_dtype)


class Mixed(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = Norm(size)
        self.query = nn.Parameter(torch.zeros(size))

    def forward(self, sources):
        logits = (self.norm(sources) * self.query).sum(-1)
        return (logits.softmax(0)[..., None] * sources).sum(0)


class Delta(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        h, heads = config.hidden_size, config.num_attention_heads
        self.layer_idx, self.heads, self.size = layer_idx, heads, config.linear_attn_config["head_dim"]
        inner = heads * self.size
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            setattr(self, name, nn.Linear(h, inner, bias=False))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            setattr(self, name, nn.Conv1d(inner, inner, 4, groups=inner, bias=False, padding=3))
        self.f_a_proj, self.f_b_proj = nn.Linear(h, 128, bias=False), nn.Linear(128, inner, bias=False)
        self.b_proj = nn.Linear(h, heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.o_norm = Norm(self.size)
        self.o_proj = nn.Linear(inner, h, bias=False)

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        q, k, v = (
            F.silu(conv(proj(hidden_states).transpose(1, 2))[..., : hidden_states.shape[1]]).transpose(1, 2)
            for proj, conv in ((self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d))
        )
        decay = torch.sigmoid(self.f_b_proj(self.f_a_proj(hidden_states)) + self.dt_bias)
        state, out = 0, []
        for t in range(q.shape[1]):
            state = state * decay[:, t, None].exp() + k[:, t, :, None] * v[:, t, None]
            out.append((q[:, t, None] @ state)[:, 0])
        if past_key_values is not None:
            past_key_values.update_recurrent_state(state, self.layer_idx)
        o = self.o_norm(torch.stack(out, 1).unflatten(-1, (self.heads, self.size))).flatten(-2)
        return self.o_proj(o * torch.sigmoid(self.g_proj(hidden_states)))


class Latent(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        h, heads = config.hidden_size, config.num_attention_heads
        self.layer_idx, self.heads = layer_idx, heads
        rank, rope, nope, value = (
            config.kv_lora_rank,
            config.qk_rope_head_dim,
            config.qk_nope_head_dim,
            config.v_head_dim,
        )
        self.q_a_proj = nn.Linear(h, config.q_lora_rank, bias=False)
        self.q_a_layernorm = Norm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(h, rank + rope, bias=False)
        self.kv_a_layernorm = Norm(rank)
        self.kv_b_proj = nn.Linear(rank, heads * (nope + value), bias=False)
        self.g_proj = nn.Linear(h, heads * value, bias=False)
        self.o_proj = nn.Linear(heads * value, h, bias=False)

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states))).unflatten(-1, (self.heads, -1))
        latent = self.kv_a_proj_with_mqa(hidden_states)
        if past_key_values is not None:
            latent, _ = past_key_values.update(latent[:, None], latent[:, None], self.layer_idx)
        k, v = self.kv_b_proj(self.kv_a_layernorm(latent[..., :512])).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        w = torch.softmax(q[..., : k.shape[-1]].transpose(1, 2) @ k.transpose(1, 2).transpose(2, 3), -1)
        return self.o_proj(
            (w @ v.transpose(1, 2)).transpose(1, 2).flatten(-2) * torch.sigmoid(self.g_proj(hidden_states))
        )


class Gated(nn.Module):
    def __init__(self, size, inner, names=("gate_proj", "up_proj", "down_proj")):
        super().__init__()
        self.names = names
        setattr(self, names[0], nn.Linear(size, inner, bias=False))
        setattr(self, names[1], nn.Linear(size, inner, bias=False))
        setattr(self, names[2], nn.Linear(inner, size, bias=False))

    def forward(self, x):
        gate, up, down = (getattr(self, n) for n in self.names)
        return down(F.silu(gate(x)) * up(x))


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        picked = (scores + self.e_score_correction_bias).topk(self.top_k, -1).indices
        return scores.gather(-1, picked), picked


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        h, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.latent_down, self.latent_up = nn.Linear(h, latent, bias=False), nn.Linear(latent, h, bias=False)
        self.latent_norm = Norm(latent)
        names = ("w1", "w3", "w2")
        self.experts = nn.ModuleList(
            Gated(latent, config.moe_intermediate_size, names) for _ in range(config.num_experts)
        )
        self.shared_experts = Gated(h, config.num_shared_experts * config.moe_intermediate_size)

    def forward(self, x):
        weights, picked = self.gate(x)
        small = self.latent_norm(self.latent_down(x))
        out = torch.zeros_like(small)
        for i, expert in enumerate(self.experts):
            out = out + expert(small) * (weights * (picked == i)).sum(-1, keepdim=True)
        return self.latent_up(out) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        delta = layer_idx + 1 in config.linear_attn_config["kda_layers"]
        self.self_attn = Delta(config, layer_idx) if delta else Latent(config, layer_idx)
        if layer_idx < config.first_k_dense_replace:
            self.mlp = Gated(config.hidden_size, config.intermediate_size)
        else:
            self.block_sparse_moe = Mixture(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(config.hidden_size), Norm(config.hidden_size)
        self.attn_res, self.mlp_res = Mixed(config.hidden_size), Mixed(config.hidden_size)

    def forward(self, sources, past_key_values=None, **kwargs):
        x = self.attn_res(sources)
        x = x + self.self_attn(self.input_layernorm(x), past_key_values=past_key_values)
        feed = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return x + feed(self.post_attention_layernorm(self.mlp_res(torch.cat([sources, x[None]]))))


class NeverSeenPreTrainedModel(PreTrainedModel):
    config_class = NeverSeenConfig
    base_model_prefix = "language_model"


class Decoder(NeverSeenPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size)

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        sources = self.embed_tokens(input_ids)[None]
        for layer in self.layers:
            sources = torch.cat([sources, layer(sources, past_key_values=past_key_values)[None]])
        return self.norm(sources[-1])


class Language(NeverSeenPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids=None, **kwargs):
        return self.lm_head(self.model(input_ids, **kwargs))


class NeverSeenForCausalLM(NeverSeenPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.language_model = Language(config.text_config)
        self.post_init()

    def get_decoder(self):
        return self.language_model.model

    def forward(self, input_ids=None, **kwargs):
        return self.language_model(input_ids, **kwargs)
