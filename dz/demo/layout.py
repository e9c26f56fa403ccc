"""The tensors of the demo checkpoint: names, shapes, and how each is filled, from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Fill = Literal["matrix", "embedding", "head", "bias", "norm", "codes", "scales", "decay", "small"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint. Packed weights are uint8 ("codes" and "scales"), all others float32."""

    name: str
    shape: tuple[int, ...]
    fill: Fill = "matrix"


def tensors(config: dict[str, Any]) -> list[Tensor]:
    """Every tensor of the checkpoint that `config` describes, in file order."""
    text, vision = config["text_config"], config["vision_config"]
    out = list(_vision("model.vision_tower", vision))
    merged = vision["hidden_size"] * vision["merge_size"] ** 2
    out += _linear("model.projector.linear_1", merged, merged, bias=True)
    out += _linear("model.projector.linear_2", text["hidden_size"], merged, bias=True)
    base = "model.language_model"
    out.append(Tensor(f"{base}.embed_tokens.weight", (text["vocab_size"], text["hidden_size"]), "embedding"))
    for i in range(text["num_hidden_layers"]):
        out += _layer(f"{base}.layers.{i}", text, i)
    out.append(Tensor(f"{base}.norm.weight", (text["hidden_size"],), "norm"))
    out.append(Tensor("lm_head.weight", (text["vocab_size"], text["hidden_size"]), "head"))
    return out


def _linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (rows, columns))
    if bias:
        yield Tensor(f"{name}.bias", (rows,), "bias")


def _norm(name: str, width: int, *, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), "norm")
    if bias:
        yield Tensor(f"{name}.bias", (width,), "bias")


def _layer(name: str, c: dict[str, Any], index: int) -> Iterator[Tensor]:
    mixers = {"linear_attention": _delta, "sliding_attention": _sliding, "indexed_attention": _latent}
    yield from mixers[c["layer_types"][index]](f"{name}.mixer", c)
    if c["mlp_layer_types"][index] == "sparse":
        yield from _experts(f"{name}.mlp", c)
    else:
        yield from _mlp(f"{name}.mlp", c["hidden_size"], c["intermediate_size"])
    yield from _norm(f"{name}.input_layernorm", c["hidden_size"])
    yield from _norm(f"{name}.post_attention_layernorm", c["hidden_size"])


def _delta(name: str, c: dict[str, Any]) -> Iterator[Tensor]:
    heads, hidden, rank = c["linear_num_heads"], c["hidden_size"], c["linear_gate_rank"]
    width = heads * c["linear_head_dim"]
    yield from _linear(f"{name}.qkv_proj", 3 * width, hidden)
    yield Tensor(f"{name}.conv1d.weight", (3 * width, 1, c["linear_conv_kernel_dim"]))
    yield from _linear(f"{name}.b_proj", heads, hidden, bias=True)
    yield from _linear(f"{name}.f_a_proj", rank, hidden)
    yield from _linear(f"{name}.f_b_proj", width, rank)
    yield Tensor(f"{name}.A_log", (heads,), "small")
    yield Tensor(f"{name}.dt_bias", (width,), "decay")
    yield from _linear(f"{name}.g_proj", width, hidden, bias=True)
    yield from _norm(f"{name}.o_norm", c["linear_head_dim"])
    yield from _linear(f"{name}.o_proj", hidden, width)


def _sliding(name: str, c: dict[str, Any]) -> Iterator[Tensor]:
    queries, keys = (c[k] * c["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield from _linear(f"{name}.{part}_proj", rows, c["hidden_size"], bias=True)
    yield from _linear(f"{name}.o_proj", c["hidden_size"], queries, bias=True)
    yield from _norm(f"{name}.q_norm", c["head_dim"])
    yield from _norm(f"{name}.k_norm", c["head_dim"])


def _latent(name: str, c: dict[str, Any]) -> Iterator[Tensor]:
    heads, hidden, rank = c["num_attention_heads"], c["hidden_size"], c["kv_lora_rank"]
    yield from _linear(f"{name}.q_a_proj", c["q_lora_rank"], hidden)
    yield from _norm(f"{name}.q_a_layernorm", c["q_lora_rank"])
    yield from _linear(f"{name}.q_b_proj", heads * (c["qk_nope_head_dim"] + c["rope_head_dim"]), c["q_lora_rank"])
    yield from _linear(f"{name}.kv_a_proj_with_mqa", rank + c["rope_head_dim"], hidden)
    yield from _norm(f"{name}.kv_a_layernorm", rank)
    yield from _linear(f"{name}.kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)
    yield from _linear(f"{name}.o_proj", hidden, heads * c["v_head_dim"])
    yield from _linear(f"{name}.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
    yield from _linear(f"{name}.indexer.wk", c["index_head_dim"], hidden)
    yield from _norm(f"{name}.indexer.k_norm", c["index_head_dim"], bias=True)
    yield from _linear(f"{name}.indexer.weights_proj", c["index_n_heads"], hidden)


def _mlp(name: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield from _linear(f"{name}.gate_proj", inner, hidden)
    yield from _linear(f"{name}.up_proj", inner, hidden)
    yield from _linear(f"{name}.down_proj", hidden, inner)


def _experts(name: str, c: dict[str, Any]) -> Iterator[Tensor]:
    experts, hidden, inner = c["num_local_experts"], c["hidden_size"], c["moe_intermediate_size"]
    for part, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        groups = (experts, rows, columns // 32)
        yield Tensor(f"{name}.experts.{part}_proj_blocks", (*groups, 16), "codes")
        yield Tensor(f"{name}.experts.{part}_proj_scales", groups, "scales")
    yield Tensor(f"{name}.gate.weight", (experts, hidden))
    yield Tensor(f"{name}.gate.e_score_correction_bias", (experts,), "bias")
    yield from _mlp(f"{name}.shared_experts", hidden, inner * c["n_shared_experts"])


def _vision(name: str, c: dict[str, Any]) -> Iterator[Tensor]:
    width = c["hidden_size"]
    yield from _linear(f"{name}.embeddings.patch_embedding", width, c["num_channels"] * c["patch_size"] ** 2, bias=True)
    yield Tensor(f"{name}.embeddings.row_embedding", (c["max_grid"], width), "embedding")
    yield Tensor(f"{name}.embeddings.column_embedding", (c["max_grid"], width), "embedding")
    for i in range(c["num_hidden_layers"]):
        layer = f"{name}.layers.{i}"
        yield from _norm(f"{layer}.layer_norm1", width, bias=True)
        yield from _linear(f"{layer}.attn.qkv", 3 * width, width, bias=True)
        yield from _linear(f"{layer}.attn.proj", width, width, bias=True)
        yield from _norm(f"{layer}.layer_norm2", width, bias=True)
        yield from _linear(f"{layer}.mlp.fc1", c["intermediate_size"], width, bias=True)
        yield from _linear(f"{layer}.mlp.fc2", width, c["intermediate_size"], bias=True)
    yield from _norm(f"{name}.norm", width, bias=True)
