"""The vision tower of Acorn, and the projector into its language model."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from .configuration_acorn import AcornConfig, AcornVisionConfig


class AcornVisionEmbeddings(nn.Module):
    """Patches to vectors, with learned embeddings of their row and column."""

    def __init__(self, config: AcornVisionConfig):
        super().__init__()
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.row_embedding = nn.Parameter(torch.zeros(config.max_grid, config.hidden_size))
        self.column_embedding = nn.Parameter(torch.zeros(config.max_grid, config.hidden_size))

    def forward(self, pixel_values, rows: int, columns: int):
        place = self.row_embedding[:rows, None] + self.column_embedding[None, :columns]
        return self.patch_embedding(pixel_values) + place.flatten(0, 1)


class AcornVisionAttention(nn.Module):
    def __init__(self, config: AcornVisionConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states):
        length, width = hidden_states.shape
        query, key, value = self.qkv(hidden_states).view(length, 3, self.num_heads, -1).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(query, key, value)
        return self.proj(out.transpose(0, 1).reshape(length, width))


class AcornVisionMLP(nn.Module):
    def __init__(self, config: AcornVisionConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states):
        return self.fc2(self.act_fn(self.fc1(hidden_states)))


class AcornVisionLayer(nn.Module):
    def __init__(self, config: AcornVisionConfig):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = AcornVisionAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = AcornVisionMLP(config)

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attn(self.layer_norm1(hidden_states))
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class AcornVisionModel(nn.Module):
    """One image at a time: its patches attend to each other, not to those of other images."""

    def __init__(self, config: AcornVisionConfig):
        super().__init__()
        self.embeddings = AcornVisionEmbeddings(config)
        self.layers = nn.ModuleList([AcornVisionLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixel_values, rows: int, columns: int):
        hidden_states = self.embeddings(pixel_values, rows, columns)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)


class AcornProjector(nn.Module):
    """`merge_size` x `merge_size` neighbouring patches to one token of the language model."""

    def __init__(self, config: AcornConfig):
        super().__init__()
        self.merge_size = config.vision_config.merge_size
        merged = config.vision_config.hidden_size * self.merge_size**2
        self.linear_1 = nn.Linear(merged, merged)
        self.act = nn.GELU()
        self.linear_2 = nn.Linear(merged, config.text_config.hidden_size)

    def forward(self, hidden_states, rows: int, columns: int):
        m = self.merge_size
        blocks = hidden_states.view(rows // m, m, columns // m, m, -1).transpose(1, 2)
        return self.linear_2(self.act(self.linear_1(blocks.reshape(rows * columns // m**2, -1))))


__all__ = ["AcornProjector", "AcornVisionEmbeddings", "AcornVisionModel"]
