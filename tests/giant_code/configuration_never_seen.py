"""Configuration of a model that no library knows: what `giant.trillion_config` writes."""

from transformers.configuration_utils import PretrainedConfig


class NeverSeenTextConfig(PretrainedConfig):
    model_type = "never_seen_text"

    def __init__(self, **kwargs):
        for name in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "linear_attn_config"):
            setattr(self, name, kwargs.pop(name, None))
        super().__init__(**kwargs)


class NeverSeenConfig(PretrainedConfig):
    model_type = "never_seen"
    sub_configs = {"text_config": NeverSeenTextConfig}  # noqa: RUF012

    def __init__(self, text_config=None, **kwargs):
        self.text_config = NeverSeenTextConfig(**text_config) if isinstance(text_config, dict) else text_config
        super().__init__(**kwargs)
