"""A configuration into an Outline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dz.inspect.outline import attention, feedforward, kinds, recurrent
from dz.inspect.outline.keys import Keys
from dz.inspect.outline.layer import FeedForward, Layer, Mixer
from dz.inspect.outline.vision import vision_parameters

_ITEMSIZE = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
MISSING = "the configuration has no"  # how a guess begins that leaves no estimate at all
UNGATED = ("relu2", "relu", "gelu", "gelu_new", "gelu_fast", "xielu")  # activations that usually have no gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model's shape. `outside` are parameters of embeddings and head, `vision` of what takes images; `residuals` is
    how many hidden vectors a token carries between layers and `mixing` by what they are mixed; `guesses` is what the
    configuration left open."""

    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    max_positions: int
    itemsize: int
    dtype: str
    outside: int
    vision: int = 0
    residuals: int = 1
    mixing: str = ""
    guesses: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """All parameters, embeddings included."""
        return self.outside + self.vision + self.dense + self.experts

    @property
    def dense(self) -> int:
        """Parameters of the layers without their routed experts."""
        return sum(x.mixer.parameters + x.forward.dense + x.vectors for x in self.layers)

    @property
    def experts(self) -> int:
        """Parameters of all routed experts."""
        return sum(x.forward.experts * x.forward.expert for x in self.layers)

    @property
    def expert_count(self) -> int:
        """Routed experts of a layer, the most of any."""
        return max((x.forward.experts for x in self.layers), default=0)

    def per_token(self, itemsize: float = 2) -> float:
        """Cache bytes of one more token of one sequence, on all devices together, each part once."""
        return sum(k.of_token(itemsize) for x in self.layers for k in x.mixer.keeps)

    def per_sequence(self, itemsize: float = 2) -> float:
        """Bytes that a sequence holds whatever its length."""
        return sum(k.of_sequence(itemsize) for x in self.layers for k in x.mixer.keeps)


def outline(raw: Mapping[str, Any]) -> Outline:
    """The outline of a configuration as it is written, or of the whole one that upstream's class completes."""
    k, guesses = Keys(raw), []
    k.refuse_nonsense("hidden_size", "num_attention_heads", "num_hidden_layers")
    mixed = kinds.mixers(k, guesses)
    fed = kinds.forwards(k, mixed)
    hidden = k.number("hidden_size", "n_embd", "d_model")
    vocab = k.number("vocab_size", "padded_vocab_size")
    dtype = str(k.get("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")
    tied = k.flag("tie_word_embeddings", default=False)
    for name, value in (("hidden_size", hidden), ("num_hidden_layers", len(mixed)), ("vocab_size", vocab)):
        if not value:
            guesses.append(f"{MISSING} {name}")
    return Outline(
        layers=tuple(
            Layer(mixer=_mixer(m, i, k), forward=_forward(f, k), vectors=2 * hidden)
            for i, (m, f) in enumerate(zip(mixed, fed, strict=True))
        ),
        hidden=hidden,
        vocab=vocab,
        max_positions=k.number("max_position_embeddings", "model_max_length", "n_positions", "max_seq_len"),
        itemsize=_ITEMSIZE.get(dtype, 2),
        dtype=dtype if dtype in _ITEMSIZE else "bfloat16",
        outside=vocab * hidden * (1 if tied else 2) + hidden + _layer_tables(k, len(mixed)),
        vision=vision_parameters(raw, hidden),
        residuals=_residuals(k, len(mixed)),
        mixing="residual mixing" if k.number("attn_res_block_size") else "hyper-connection" * (_residuals(k, 1) > 1),
        guesses=tuple(dict.fromkeys(guesses)),
    )


def _layer_tables(k: Keys, layers: int) -> int:
    """Embeddings of tokens that every layer has of its own."""
    return k.number("vocab_size_per_layer_input") * k.number("hidden_size_per_layer_input") * layers


def _residuals(k: Keys, layers: int) -> int:
    """Hidden vectors that a token carries from layer to layer: 1; the streams of hyper-connections; or with residual
    mixing the snapshots of every block and the running sum."""
    if block := k.number("attn_res_block_size"):
        return -(-layers // block) + 1
    return max(k.number("hc_mult", "hyper_connection_rate"), 1)


def _mixer(kind: str, index: int, k: Keys) -> Mixer:
    if kind.startswith("rate:"):
        return attention.compressed(k, int(kind[5:]))
    if kind == kinds.STATE:
        return recurrent.delta_rule(k)
    if kind == kinds.SPACE:
        return recurrent.state_space(k)
    if kind == kinds.CONV:
        return recurrent.short_convolution(k)
    if kind == kinds.NONE:
        return Mixer(op="", keeps=(), parameters=0)
    if kind == kinds.WINDOW:
        return attention.grouped(k, window=k.number("sliding_window", "attention_chunk_size", default=4096))
    if kind == kinds.BOTH:
        first, second = attention.grouped(k), recurrent.state_space(k)
        return Mixer(
            op="attention and " + second.op,
            keeps=first.keeps + second.keeps,
            parameters=first.parameters + second.parameters,
            heads=first.heads,
        )
    if attention.is_latent(k):
        return attention.latent(k, own_index=_own_index(k, index))
    return attention.grouped(k, keys_too=_sparse(k, index))


def _own_index(k: Keys, index: int) -> bool:
    types = k.listed("indexer_types")
    return types is None or index >= len(types) or types[index] != "shared"


def _sparse(k: Keys, index: int) -> bool:
    """With types by layer only those that do not say full attention pick what they attend to."""
    types = k.listed("layer_types")
    return types is None or index >= len(types) or types[index] != "full_attention"


def _forward(kind: str, k: Keys) -> FeedForward:
    if kind == kinds.NONE:
        return FeedForward()
    act = k.get("hidden_act", "mlp_hidden_act", "activation_function", "hidden_activation")
    gated = act not in UNGATED
    return feedforward.mixture(k, gated=gated) if kind == kinds.MOE else feedforward.dense(k, gated=gated)
