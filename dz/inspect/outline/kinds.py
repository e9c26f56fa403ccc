"""Which layer is what, from the many ways in which configurations say it."""

from __future__ import annotations

from dz.errors import Refused
from dz.inspect.outline.feedforward import EXPERTS
from dz.inspect.outline.keys import Keys

FULL, WINDOW, STATE, SPACE, CONV, BOTH, NONE = "full", "window", "delta", "space", "conv", "both", "none"
DENSE, MOE = "dense", "moe"
_LETTERS = {"M": SPACE, "*": FULL, "-": DENSE, "E": MOE}
_SPACE_KEYS = ("mamba_d_state", "ssm_state_size", "state_size")
MOST_LAYERS = 10_000


def layer_count(k: Keys) -> int:
    """Decoder layers; where only a list by layer is given, its length."""
    named = k.number("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if named > MOST_LAYERS:
        what, why = f"the configuration names {named:,} layers", f"more than {MOST_LAYERS:,} are taken for a mistake"
        raise Refused(what, why, "mend config.json", code="bad_config")
    types = k.listed("layer_types", "layers_block_type")
    pattern = k.get("hybrid_override_pattern")
    return named or len(types or ()) or (len(pattern) if isinstance(pattern, str) else 0)


def mixers(k: Keys, guesses: list[str]) -> list[str]:
    """The mixer of each layer: FULL, WINDOW, STATE, SPACE, CONV, BOTH, NONE, or "rate:N" for pooled keys."""
    n = layer_count(k)
    named = k.listed("layer_types", "layers_block_type")
    if named and len(named) >= n:
        return [_of_type(str(t), k, guesses) for t in named[:n]]
    rates = k.listed("compress_ratios", "compress_rates")
    if rates and len(rates) >= n:
        return [f"rate:{int(r or 0)}" for r in rates[:n]]
    pattern = k.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [m if (m := _LETTERS.get(c, NONE)) in (SPACE, FULL) else NONE for c in pattern[:n]]
    return _by_rule(k, n, guesses)


def _of_type(name: str, k: Keys, guesses: list[str]) -> str:
    if name in ("full_attention", "attention", "indexed_attention", "global_attention", "dense_attention"):
        return FULL
    if name in ("sliding_attention", "chunked_attention", "local_attention", "sliding_window"):
        return "rate:0" if isinstance(k.get("compress_rates"), dict) else WINDOW
    rates = k.get("compress_rates")
    if isinstance(rates, dict) and name in rates:
        return f"rate:{int(rates[name])}"
    if name == "linear_attention":
        return SPACE if k.get(*_SPACE_KEYS) is not None else STATE
    if name in ("mamba", "mamba2", "mamba1"):
        return SPACE
    if name in ("conv", "short_conv"):
        return CONV
    if name in ("hybrid", "parallel"):
        return BOTH
    if name in ("moe", "mlp", "dense", "sparse"):
        return NONE
    if "attention" in name or name.endswith("_sparse"):
        if not name.endswith("_sparse"):
            guesses.append(f"layers of type {name!r} are taken for full attention")
        return FULL
    guesses.append(f"layers of type {name!r} are not known; taken for full attention")
    return FULL


def _by_rule(k: Keys, n: int, guesses: list[str]) -> list[str]:
    first = k.listed("linear_attn_config.kda_layers", "linear_attn_config.linear_layers")
    if first is not None:
        return [STATE if i + 1 in first else FULL for i in range(n)]  # these lists count from one
    if (every := k.number("full_attention_interval")) and k.get("linear_num_value_heads") is not None:
        return [FULL if (i + 1) % every == 0 else STATE for i in range(n)]
    at = k.listed("attn_layer_indices", "attention_layers_idx", "full_attn_idxs")
    if at is not None:
        other = CONV if k.get("conv_L_cache") is not None else SPACE
        return [FULL if i in at else other for i in range(n)]
    if period := k.number("attn_layer_period"):
        return [FULL if i % period == k.number("attn_layer_offset") else SPACE for i in range(n)]
    if k.get(*_SPACE_KEYS) is not None:
        return [BOTH if k.get("num_attention_heads") is not None else SPACE] * n
    if k.get("num_attention_heads", "n_head", "n_heads") is None:
        guesses.append("the configuration names neither layers nor heads")
    return _windows(k, n, guesses)


def _windows(k: Keys, n: int, guesses: list[str]) -> list[str]:
    window = k.number("sliding_window")
    if not window or not k.flag("use_sliding_window", default=True) or window >= k.number("max_position_embeddings"):
        return [FULL] * n
    if every := k.number("sliding_window_pattern", "_sliding_window_pattern"):
        return [FULL if (i + 1) % every == 0 else WINDOW for i in range(n)]
    if k.get("max_window_layers") is not None and k.get("use_sliding_window") is not None:
        return [FULL if i < k.number("max_window_layers") else WINDOW for i in range(n)]
    guesses.append(f"a window of {window} is named and no layers: all are taken for windowed")
    return [WINDOW] * n


def forwards(k: Keys, mixed: list[str]) -> list[str]:
    """The feed-forward part of each layer: DENSE, MOE, NONE or BOTH."""
    n = layer_count(k)
    blocks = k.listed("layers_block_type")
    pattern = k.get("hybrid_override_pattern")
    if blocks and any(b in ("moe", "mlp") for b in blocks):
        return [{"moe": MOE, "mlp": DENSE}.get(b, NONE) for b in blocks[:n]]
    if isinstance(pattern, str):
        return [m if (m := _LETTERS.get(c, NONE)) in (DENSE, MOE) else NONE for c in pattern[:n]]
    width = k.get("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "dense_intermediate_size")
    if all(m == SPACE for m in mixed) and (width is None or k.get("num_attention_heads") is None):
        return [NONE] * n
    if not k.number(*EXPERTS) or not k.flag("is_moe", default=True):
        return [DENSE] * n
    named = k.listed("mlp_layer_types")
    if named and len(named) >= n:
        return [DENSE if t in ("dense", "mlp") else MOE for t in named[:n]]
    return [MOE if _sparse(k, i) else DENSE for i in range(n)]


def _sparse(k: Keys, i: int) -> bool:
    if i < k.number("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"):
        return False
    listed = k.listed("moe_layers", "moe_layers_idx")
    if listed is not None:
        return i in listed
    freq = k.listed("moe_layer_freq", "moe_layer_pattern")
    if freq is not None and len(freq) > i:
        return bool(freq[i])
    if i in (k.listed("mlp_only_layers") or ()):
        return False
    if every := k.number("expert_layer_period"):
        return i % every == k.number("expert_layer_offset")
    step = k.number(
        "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", "moe_layer_interval", default=1
    )
    return step < 2 or (i + 1) % step == 0
