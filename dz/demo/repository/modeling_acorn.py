"""Acorn: an image-text model whose layers mix tokens in three ways.

- `AcornSparseLatentAttention`: keys and values of all heads come from one small latent per token; each query attends to
  the `index_topk` tokens that a light indexer scores highest.
- `AcornSlidingAttention`: grouped-query attention within a window.
- `AcornDeltaAttention`: a gated delta rule with a decay for each channel, after a short causal convolution.

Experts are stored as MXFP4 and unpacked when they are used."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from .configuration_acorn import AcornConfig, AcornTextConfig
from .modeling_acorn_vision import AcornProjector, AcornVisionEmbeddings, AcornVisionModel

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


# the name under which outputs carry the cache: it changed between versions of transformers
OUTPUT_CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class AcornRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class AcornRMSNormGated(nn.Module):
    """RMS norm of each head, times the sigmoid of a gate."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states, gate):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(input_dtype)
        return (hidden_states * torch.sigmoid(gate.to(torch.float32))).to(input_dtype)


class AcornRotaryEmbedding(nn.Module):
    def __init__(self, config: AcornTextConfig):
        super().__init__()
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        rope_init_fn: Callable = self.compute_default_rope_parameters
        if self.rope_type != "default":
            rope_init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = rope_init_fn(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config, device=None, **kwargs):
        dim = config.rope_head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float, device=device) / dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Rotary position embedding of query and key; heads lie along `unsqueeze_dim`."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """[B, H_kv, T, D] -> [B, H_kv * n_rep, T, D]"""
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    key_states = repeat_kv(key, module.num_key_value_groups)
    value_states = repeat_kv(value, module.num_key_value_groups)

    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask

    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


class AcornSlidingAttention(nn.Module):
    """Grouped-query attention over the last `sliding_window` tokens; the first `rope_head_dim` channels are rotated."""

    def __init__(self, config: AcornTextConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.rope_head_dim = config.rope_head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.sliding_window = config.sliding_window
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=True)
        self.q_norm = AcornRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = AcornRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        parts = [self.rope_head_dim, self.head_dim - self.rope_head_dim]
        query_rot, query_pass = query.split(parts, dim=-1)
        key_rot, key_pass = key.split(parts, dim=-1)
        query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, *position_embeddings)
        query = torch.cat((query_rot, query_pass), dim=-1)
        key = torch.cat((key_rot, key_pass), dim=-1)

        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, _ = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(attn_output.reshape(*input_shape, -1).contiguous())


def visible_keys(attention_mask, query_length: int, key_length: int, device) -> torch.Tensor:
    """Which keys each query may see, [B|1, query_length, key_length] bool, from any form of mask: None is causal with
    the queries at the end of the keys, boolean as it is, additive where it is 0."""
    if attention_mask is None:
        ones = torch.ones(1, query_length, key_length, dtype=torch.bool, device=device)
        return ones.tril(key_length - query_length)
    mask = attention_mask[:, 0]
    return mask if mask.dtype == torch.bool else mask == 0


class AcornIndexer(nn.Module):
    """Scores all cached tokens for each query and picks `index_topk` of them; among equal scores the earliest wins."""

    def __init__(self, config: AcornTextConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.n_heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.rope_head_dim = config.rope_head_dim
        self.index_topk = config.index_topk
        self.wq_b = nn.Linear(config.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, self.n_heads, bias=False)
        self.softmax_scale = self.head_dim**-0.5

    @torch.no_grad()
    def forward(self, hidden_states, q_resid, position_embeddings, attention_mask, past_key_values=None):
        """[B, S, T] bool: the keys that each query attends to."""
        batch_size, seq_len, _ = hidden_states.shape
        parts = [self.rope_head_dim, self.head_dim - self.rope_head_dim]
        q = self.wq_b(q_resid).view(batch_size, seq_len, self.n_heads, self.head_dim)
        k = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
        q_rot, q_pass = q.split(parts, dim=-1)
        k_rot, k_pass = k.split(parts, dim=-1)
        q_rot, k_rot = apply_rotary_pos_emb(q_rot, k_rot, *position_embeddings, unsqueeze_dim=2)
        q = torch.cat((q_rot, q_pass), dim=-1)  # [B, S, H, D]
        k = torch.cat((k_rot, k_pass), dim=-1).squeeze(2)  # [B, S, D]
        if past_key_values is not None:
            k = past_key_values.update_indexer(k, self.layer_idx)  # [B, T, D]

        visible = visible_keys(attention_mask, seq_len, k.shape[1], k.device).expand(batch_size, -1, -1)
        if k.shape[1] <= self.index_topk:
            return visible
        weights = self.weights_proj(hidden_states).float() * self.n_heads**-0.5  # [B, S, H]
        scores = F.relu(torch.einsum("bshd,btd->bsht", q.float(), k.float()) * self.softmax_scale)
        scores = torch.einsum("bsh,bsht->bst", weights, scores).masked_fill(~visible, float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.index_topk]
        return torch.zeros_like(visible).scatter(-1, best, True) & visible


class AcornSparseLatentAttention(nn.Module):
    """Latent attention: the cache holds one normalised latent and one rotated key part per token, expanded per head
    when used; each query sees the tokens that the indexer picks."""

    def __init__(self, config: AcornTextConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = 1
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_rope_head_dim = config.rope_head_dim
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_head_dim = config.qk_nope_head_dim + config.rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.scaling = self.qk_head_dim**-0.5
        self.is_causal = True
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = AcornRMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.kv_lora_rank + config.rope_head_dim, bias=False)
        self.kv_a_layernorm = AcornRMSNorm(config.kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, self.num_heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(self.num_heads * config.v_head_dim, config.hidden_size, bias=False)
        self.indexer = AcornIndexer(config, layer_idx)

    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [B, 1, T, R] and rotated key parts [B, 1, T, Dr] to keys and values [B, H, T, D]."""
        batch_size, _, length, _ = kv_nope.shape
        kv = self.kv_b_proj(kv_nope).view(batch_size, length, self.num_heads, -1).transpose(1, 2)
        k_nope, value = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return torch.cat((k_nope, k_rot.expand(-1, self.num_heads, -1, -1)), dim=-1), value

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        batch_size, seq_length = hidden_states.shape[:-1]
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(q_resid).view(batch_size, seq_length, -1, self.qk_head_dim).transpose(1, 2)
        q_pass, q_rot = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)

        compressed = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1)
        kv_pass, k_rot = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv_pass = self.kv_a_layernorm(kv_pass)
        q_rot, k_rot = apply_rotary_pos_emb(q_rot, k_rot, *position_embeddings)
        if past_key_values is not None:
            kv_pass, k_rot = past_key_values.update(kv_pass, k_rot, self.layer_idx)

        query = torch.cat((q_pass, q_rot), dim=-1)
        key, value = self.expand_kv(kv_pass, k_rot)
        chosen = self.indexer(hidden_states, q_resid, position_embeddings, attention_mask, past_key_values)
        chosen = chosen.unsqueeze(1)  # [B, 1, S, T]
        if self.config._attn_implementation == "eager":
            chosen = torch.zeros_like(chosen, dtype=query.dtype).masked_fill(~chosen, torch.finfo(query.dtype).min)

        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, _ = attention_interface(
            self, query, key, value, chosen, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(attn_output.reshape(batch_size, seq_length, -1).contiguous())


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps)


def recurrent_gated_delta(query, key, value, g, beta, state):
    """The gated delta rule, token by token, in float32.

    query, key [B, S, H, Dk], value [B, S, H, Dv], log decay g [B, S, H, Dk], beta [B, S, H], state [B, H, Dk, Dv] ->
    output [B, S, H, Dv] and the next state: `S = exp(g) S; S += k (beta (v - k^T S))^T; o = q^T S`."""
    outputs = []
    for t in range(query.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        seen = torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        delta = (value[:, t] - seen) * beta[:, t].unsqueeze(-1)
        state = state + key[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(outputs, dim=1), state


def chunk_gated_delta(query, key, value, g, beta, state, chunk_size=16):
    """The same function in chunks, for many tokens.

    With `A = tril(beta K~ K~^T, -1)`, K~ the keys under their decays, `(I + A)^-1` turns all deltas of a chunk into one
    product. A decay above -5 keeps exp(|G|) of 16 steps within float32."""
    length, v_dim = query.shape[1], value.shape[-1]
    padding = -length % chunk_size

    def chunks(x):  # [B, S, H, D] -> [N, B, H, C, D]
        x = F.pad(x, (0, 0, 0, 0, 0, padding)).transpose(1, 2)
        return x.unflatten(2, (-1, chunk_size)).movedim(2, 0)

    query, key, value, g, beta = (chunks(x) for x in (query, key, value, g, beta.unsqueeze(-1)))
    total = g.cumsum(dim=-2)
    up, down = key * total.exp(), key * (-total).exp()
    eye = torch.eye(chunk_size, dtype=query.dtype, device=query.device)
    inner = (beta * up @ down.transpose(-1, -2)).tril(-1)
    inverse = torch.linalg.solve_triangular(eye + inner, eye.expand_as(inner), upper=False, unitriangular=True)
    written, erased = inverse @ (beta * value), inverse @ (beta * up)
    query = query * total.exp()
    scores = (query @ down.transpose(-1, -2)).tril()
    last = total[..., -1:, :]
    kept = key * (last - total).exp()

    outputs = []
    for n in range(query.shape[0]):
        delta = written[n] - erased[n] @ state
        outputs.append(query[n] @ state + scores[n] @ delta)
        state = state * last[n].exp().transpose(-1, -2) + kept[n].transpose(-1, -2) @ delta
    out = torch.stack(outputs).movedim(0, 2).reshape(query.shape[1], query.shape[2], -1, v_dim)
    return out[:, :, :length].transpose(1, 2), state


class AcornDeltaAttention(nn.Module):
    """Linear attention by a gated delta rule. Per sequence the cache keeps the last inputs of the convolution and one
    matrix per head."""

    def __init__(self, config: AcornTextConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.linear_num_heads
        self.head_dim = config.linear_head_dim
        self.width = self.num_heads * self.head_dim
        self.conv_kernel_size = config.linear_conv_kernel_dim
        self.gate_lower_bound = config.linear_gate_lower_bound
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * self.width, bias=False)
        self.conv1d = nn.Conv1d(
            3 * self.width, 3 * self.width, kernel_size=self.conv_kernel_size, groups=3 * self.width, bias=False
        )
        self.b_proj = nn.Linear(config.hidden_size, self.num_heads, bias=True)
        self.f_a_proj = nn.Linear(config.hidden_size, config.linear_gate_rank, bias=False)
        self.f_b_proj = nn.Linear(config.linear_gate_rank, self.width, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(self.width, dtype=torch.float32))
        self.g_proj = nn.Linear(config.hidden_size, self.width, bias=True)
        self.o_norm = AcornRMSNormGated(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(self.width, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        """`position_embeddings` are not used: the recurrence knows the order."""
        batch_size, seq_len, _ = hidden_states.shape
        if attention_mask is not None:  # [B, S], zero at padding: it must leave no trace in the state
            hidden_states = hidden_states * attention_mask[:, :, None].to(hidden_states.dtype)
        state = self._recurrent_state(past_key_values)
        mixed = self.qkv_proj(hidden_states).transpose(1, 2)
        if past_key_values is not None:
            mixed = past_key_values.update_conv_state(mixed, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        mixed = F.silu(self.conv1d(F.pad(mixed, (self.conv_kernel_size - 1, 0)))[..., -seq_len:])

        shape = (batch_size, seq_len, self.num_heads, self.head_dim)
        query, key, value = (x.reshape(shape).float() for x in mixed.transpose(1, 2).chunk(3, dim=-1))
        query, key = l2norm(query) * self.head_dim**-0.5, l2norm(key)
        beta = torch.sigmoid(self.b_proj(hidden_states).float())
        decay = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias
        g = self.gate_lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * decay.view(shape))

        if state is None:
            state = query.new_zeros(batch_size, self.num_heads, self.head_dim, self.head_dim)
        delta_rule = recurrent_gated_delta if seq_len == 1 else chunk_gated_delta
        out, state = delta_rule(query, key, value, g, beta, state)
        if past_key_values is not None:
            past_key_values.update_recurrent_state(state, self.layer_idx)

        gate = self.g_proj(hidden_states).view(shape)
        out = self.o_norm(out.to(hidden_states.dtype), gate)
        return self.o_proj(out.reshape(batch_size, seq_len, -1))

    def _recurrent_state(self, past_key_values):
        """[B, H, Dk, Dv], or None at the start of a sequence; must be read before the conv state is updated."""
        if past_key_values is None:
            return None
        if hasattr(past_key_values, "get_recurrent_state"):
            return past_key_values.get_recurrent_state(self.layer_idx)
        if past_key_values.has_previous_state(self.layer_idx):
            return past_key_values.layers[self.layer_idx].recurrent_states[0]
        return None


class AcornMLP(nn.Module):
    def __init__(self, config, intermediate_size=None):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class AcornTopkRouter(nn.Module):
    """Sigmoid scores; a correction bias takes part in the choice of experts, not in their weights."""

    def __init__(self, config: AcornTextConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_local_experts
        self.hidden_dim = config.hidden_size
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.zeros(self.num_experts, self.hidden_dim))
        self.register_buffer("e_score_correction_bias", torch.zeros(self.num_experts, dtype=torch.float32))

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
        scores = router_logits.sigmoid()
        scores_for_choice = scores + self.e_score_correction_bias
        topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
        topk_weights = scores.gather(1, topk_indices)
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
        topk_weights = topk_weights * self.routed_scaling_factor
        return router_logits, topk_weights, topk_indices


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """MXFP4 to `dtype`: blocks [..., K/32, 16] uint8, two e2m1 codes a byte and the low one first; scales [..., K/32]
    uint8, powers of two with a bias of 127 -> [..., K]."""
    table = torch.tensor(E2M1, dtype=dtype, device=blocks.device)
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    values = torch.ldexp(table[codes.int()], scales.to(torch.int32).unsqueeze(-1) - 127)
    return values.flatten(-2)


class AcornExperts(nn.Module):
    """Gated experts. Their weights stay packed; those of the experts that were hit are unpacked in each call."""

    def __init__(self, config: AcornTextConfig):
        super().__init__()
        experts, hidden, inner = config.num_local_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = experts
        self.hidden_dim = hidden
        self.intermediate_dim = inner
        self.gate_up_proj_blocks = self._packed(experts, 2 * inner, hidden // 32, 16)
        self.gate_up_proj_scales = self._packed(experts, 2 * inner, hidden // 32)
        self.down_proj_blocks = self._packed(experts, hidden, inner // 32, 16)
        self.down_proj_scales = self._packed(experts, hidden, inner // 32)
        self.act_fn = ACT2FN[config.hidden_act]

    @staticmethod
    def _packed(*shape):
        return nn.Parameter(torch.zeros(*shape, dtype=torch.uint8), requires_grad=False)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final_hidden_states = torch.zeros_like(hidden_states)
        hit = top_k_index.unique()
        gate_up_proj = unpack_mxfp4(self.gate_up_proj_blocks[hit], self.gate_up_proj_scales[hit], hidden_states.dtype)
        down_proj = unpack_mxfp4(self.down_proj_blocks[hit], self.down_proj_scales[hit], hidden_states.dtype)
        for i, expert in enumerate(hit):
            token_idx, position = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token_idx], gate_up_proj[i]).chunk(2, dim=-1)
            current = F.linear(self.act_fn(gate) * up, down_proj[i])
            current = current * top_k_weights[token_idx, position, None]
            final_hidden_states.index_add_(0, token_idx, current.to(final_hidden_states.dtype))
        return final_hidden_states


class AcornMoE(nn.Module):
    def __init__(self, config: AcornTextConfig):
        super().__init__()
        self.experts = AcornExperts(config)
        self.gate = AcornTopkRouter(config)
        self.shared_experts = AcornMLP(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden_states):
        residuals = hidden_states
        _, topk_weights, topk_indices = self.gate(hidden_states)
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        routed = self.experts(flat, topk_indices, topk_weights).view_as(hidden_states)
        return routed + self.shared_experts(residuals)


MIXERS = {"linear_attention": AcornDeltaAttention, "sliding_attention": AcornSlidingAttention}


class AcornDecoderLayer(nn.Module):
    def __init__(self, config: AcornTextConfig, layer_idx: int):
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        self.mixer = MIXERS.get(self.layer_type, AcornSparseLatentAttention)(config, layer_idx)
        self.mlp = AcornMoE(config) if config.mlp_layer_types[layer_idx] == "sparse" else AcornMLP(config)
        self.input_layernorm = AcornRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = AcornRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        residual = hidden_states
        hidden_states = self.mixer(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class AcornPreTrainedModel(PreTrainedModel):
    config_class = AcornConfig
    base_model_prefix = "model"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = False
    _no_split_modules = ["AcornDecoderLayer", "AcornVisionLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _is_stateful = True
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "e_score_correction_bias"]

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, AcornDeltaAttention):
            init.zeros_(module.A_log)
            init.zeros_(module.dt_bias)
        elif isinstance(module, AcornTopkRouter):
            init.normal_(module.weight, mean=0.0, std=0.02)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, AcornExperts):
            for name in ("gate_up_proj", "down_proj"):
                init.zeros_(getattr(module, f"{name}_blocks"))
                init.constant_(getattr(module, f"{name}_scales"), 127)
        elif isinstance(module, AcornVisionEmbeddings):
            init.normal_(module.row_embedding, mean=0.0, std=0.02)
            init.normal_(module.column_embedding, mean=0.0, std=0.02)


class AcornTextModel(AcornPreTrainedModel):
    config_class = AcornTextConfig

    def __init__(self, config: AcornTextConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([AcornDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = AcornRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = AcornRotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past).unsqueeze(0)

        masks = attention_mask
        if not isinstance(masks, dict):
            masks = self._masks(inputs_embeds, attention_mask, past_key_values, position_ids)
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)

        hidden_states, all_hidden_states = inputs_embeds, ()
        for layer in self.layers:
            all_hidden_states += (hidden_states,)
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer.layer_type],
                past_key_values=past_key_values,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            hidden_states=(*all_hidden_states, hidden_states) if output_hidden_states else None,
            **{OUTPUT_CACHE: past_key_values},
        )

    def _masks(self, inputs_embeds, attention_mask, past_key_values, position_ids):
        """A mask for each type of layer. Only the positional order of the arguments is the same in all versions."""
        args = (self.config, inputs_embeds, attention_mask, past_key_values)
        masks = {}
        for kind in set(self.config.layer_types):
            if kind == "linear_attention":
                masks[kind] = create_recurrent_attention_mask(*args)
            elif kind == "sliding_attention":
                masks[kind] = create_sliding_window_causal_mask(*args, position_ids=position_ids)
            else:
                masks[kind] = create_causal_mask(*args, position_ids=position_ids)
        return masks


class AcornModel(AcornPreTrainedModel):
    def __init__(self, config: AcornConfig):
        super().__init__(config)
        self.vision_tower = AcornVisionModel(config.vision_config)
        self.projector = AcornProjector(config)
        self.language_model = AcornTextModel(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.embed_tokens

    def set_input_embeddings(self, value):
        self.language_model.embed_tokens = value

    def get_decoder(self):
        return self.language_model

    def get_image_features(self, pixel_values, image_grid_hw, **kwargs):
        """`pooler_output` holds one tensor [tokens, hidden] for each image."""
        grids = image_grid_hw.tolist()
        images = pixel_values.to(self.dtype).split([rows * columns for rows, columns in grids])
        states = [self.vision_tower(x, *grid) for x, grid in zip(images, grids, strict=True)]
        features = [self.projector(x, *grid) for x, grid in zip(states, grids, strict=True)]
        return BaseModelOutputWithPooling(last_hidden_state=torch.cat(states), pooler_output=features)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.FloatTensor | None = None,
        image_grid_hw: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            if input_ids is None:
                raise ValueError("images need input_ids, which say where they belong")
            features = torch.cat(self.get_image_features(pixel_values, image_grid_hw).pooler_output)
            where = input_ids == self.config.image_token_id
            if int(where.sum()) != features.shape[0]:
                raise ValueError(f"the prompt has {int(where.sum())} image tokens, the images have {features.shape[0]}")
            features = features.to(inputs_embeds.device, inputs_embeds.dtype)
            inputs_embeds = inputs_embeds.masked_scatter(where.unsqueeze(-1), features)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )


class AcornForConditionalGeneration(AcornPreTrainedModel, GenerationMixin):
    def __init__(self, config: AcornConfig):
        super().__init__(config)
        self.model = AcornModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.lm_head

    def get_decoder(self):
        return self.model.get_decoder()

    def get_image_features(self, pixel_values, image_grid_hw, **kwargs):
        return self.model.get_image_features(pixel_values, image_grid_hw, **kwargs)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.FloatTensor | None = None,
        image_grid_hw: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: Cache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """`cache` is the newer name of `past_key_values`."""
        outputs = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            image_grid_hw=image_grid_hw,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache if past_key_values is None else past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        slice_indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, slice_indices, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{OUTPUT_CACHE: getattr(outputs, OUTPUT_CACHE)},
        )

    def prepare_inputs_for_generation(self, input_ids, is_first_iteration=False, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration and kwargs.get("use_cache", True):
            inputs["pixel_values"] = inputs["image_grid_hw"] = None  # they are in the cache
        return inputs


__all__ = ["AcornPreTrainedModel", "AcornTextModel", "AcornModel", "AcornForConditionalGeneration"]
