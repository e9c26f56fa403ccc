"""Configuration of Acorn, a small image-text model with sparse latent, sliding-window and linear attention layers."""

from huggingface_hub.dataclasses import strict
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicIndexedLayer
from transformers.configuration_utils import PreTrainedConfig


def _indexed_layer_type() -> str:
    """The name under which the installed transformers keeps layers with a cache of index keys."""
    if "indexed_attention" in DYNAMIC_LAYER_TYPE_MAPPING:
        return "indexed_attention"
    return next(name for name, layer in DYNAMIC_LAYER_TYPE_MAPPING.items() if layer is DynamicIndexedLayer)


@strict
class AcornVisionConfig(PreTrainedConfig):
    r"""
    patch_size (`int`): side of a patch in pixels.
    merge_size (`int`): `merge_size` x `merge_size` patches become one token of the language model.
    max_grid (`int`): most patches along one side of an image.
    """

    model_type = "acorn_vision"
    base_config_key = "vision_config"

    hidden_size: int = 64
    intermediate_size: int = 160
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_channels: int = 3
    patch_size: int = 8
    merge_size: int = 2
    max_grid: int = 16
    layer_norm_eps: float = 1e-6
    hidden_act: str = "gelu"
    initializer_range: float = 0.02


@strict
class AcornTextConfig(PreTrainedConfig):
    r"""
    layer_types (`list[str]`): the token mixer of each layer, `indexed_attention` (latent attention over the
        `index_topk` tokens that the indexer picks), `sliding_attention` (grouped queries) or `linear_attention`
        (gated delta rule with a decay for each channel).
    mlp_layer_types (`list[str]`): `dense` or `sparse` (experts, stored as MXFP4) for each layer.
    linear_gate_lower_bound (`float`): the log decay of a step lies between this and 0.
    """

    model_type = "acorn_text"
    base_config_key = "text_config"

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 320
    num_hidden_layers: int = 6
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None

    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    sliding_window: int = 24
    rope_head_dim: int = 16
    rope_parameters: dict | None = None

    q_lora_rank: int = 48
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 24
    v_head_dim: int = 32
    index_n_heads: int = 8
    index_head_dim: int = 32
    index_topk: int = 16

    linear_num_heads: int = 4
    linear_head_dim: int = 32
    linear_gate_rank: int = 32
    linear_gate_lower_bound: float = -5.0
    linear_conv_kernel_dim: int = 4

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    moe_intermediate_size: int = 64
    routed_scaling_factor: float = 1.5

    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            cycle = ["linear_attention", "indexed_attention", "linear_attention", "sliding_attention"]
            self.layer_types = [cycle[i % len(cycle)] for i in range(self.num_hidden_layers)]
        if self.mlp_layer_types is None:
            self.mlp_layer_types = ["dense" if i == 0 else "sparse" for i in range(self.num_hidden_layers)]
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        self.layer_types = [_indexed_layer_type() if t == "indexed_attention" else t for t in self.layer_types]
        super().__post_init__(**kwargs)


@strict
class AcornConfig(PreTrainedConfig):
    r"""
    image_token_id (`int`): the placeholder that is replaced by the embedding of an image token.
    """

    model_type = "acorn"
    sub_configs = {"text_config": AcornTextConfig, "vision_config": AcornVisionConfig}

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 5
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        if not isinstance(self.text_config, PreTrainedConfig):
            self.text_config = AcornTextConfig(**(self.text_config or {}))
        if not isinstance(self.vision_config, PreTrainedConfig):
            self.vision_config = AcornVisionConfig(**(self.vision_config or {}))
        super().__post_init__(**kwargs)


__all__ = ["AcornConfig", "AcornTextConfig", "AcornVisionConfig"]
