"""Attention from a configuration: grouped heads, latents, windows, index keys, compressed keys."""

from __future__ import annotations

from dz.inspect.outline.keys import Keys
from dz.inspect.outline.layer import Keep, Mixer

INDEX_SCALE = 4  # bytes: an index key is kept as e4m3 with one fp32 scale (the form that its scoring kernels take)


def heads_of(k: Keys) -> tuple[int, int, int]:
    """(query heads, key-value heads, head size)."""
    heads = k.number("num_attention_heads", "n_head", "n_heads", "num_heads")
    shared = k.number("num_key_value_heads", "multi_query_group_num", "num_kv_heads", "n_head_kv", default=heads)
    hidden = k.number("hidden_size", "n_embd", "d_model")
    size = k.number("head_dim", "attention_head_dim", "kv_channels", default=hidden // heads if heads else 0)
    return heads, shared, size


def grouped(k: Keys, *, window: int = 0, keys_too: bool = True) -> Mixer:
    """Grouped-query attention; `window` > 0 keeps that many tokens and no more."""
    heads, shared, size = heads_of(k)
    hidden = k.number("hidden_size", "n_embd", "d_model")
    value = k.number("v_head_dim", default=size)
    kept = shared * (size + value)
    words = f"{shared} heads x ({size} + {value})"
    own = Keep(kind="keys and values", per_token=kept, heads=shared, formula=words)
    if window:
        own = Keep(kind="window", window=kept, tokens=window, heads=shared, formula=f"{words}, {window} tokens")
    gate = heads * size if k.flag("attn_output_gate", "use_output_gate") else 0
    matrices = hidden * (heads * size + gate + kept) + heads * value * hidden
    index = index_keys(k) if keys_too and not window else None
    return Mixer(
        op="attention",
        keeps=(own, *([index] if index else [])),
        parameters=matrices + (index_parameters(k) if index else 0),
        heads=heads,
    )


def is_latent(k: Keys) -> bool:
    """Whether full attention keeps one latent a token."""
    return k.number("kv_lora_rank") > 0


def latent(k: Keys, *, with_index: bool = True, own_index: bool = True) -> Mixer:
    """Latent attention: a compressed key-value vector and the shared rope part, for all heads together. `own_index`
    off: a layer that reuses another one's selection keeps no index keys of its own."""
    heads, _, _ = heads_of(k)
    hidden = k.number("hidden_size")
    rank, rope = k.number("kv_lora_rank"), k.number("qk_rope_head_dim")
    nope = k.number("qk_nope_head_dim", default=k.number("head_dim"))
    value, down = k.number("v_head_dim", default=nope), k.number("q_lora_rank")
    query = hidden * down + down * heads * (nope + rope) if down else hidden * heads * (nope + rope)
    matrices = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    if k.flag("mla_use_output_gate", "use_output_gate", "attn_output_gate"):
        matrices += hidden * heads * value
    keep = Keep(kind="latent", per_token=rank + rope, split="whole", formula=f"{rank} + {rope}")
    index = index_keys(k) if with_index and own_index else None
    return Mixer(
        op="mla",
        keeps=(keep, *([index] if index else [])),
        parameters=matrices + (index_parameters(k) if index else 0),
        heads=heads,
    )


def index_keys(k: Keys) -> Keep | None:
    """The keys by which a sparse mixer picks what to attend to; None when the configuration names no index."""
    size, pool = k.number("index_head_dim"), max(k.number("index_kpool", "index_pool_size"), 1)
    if not size:
        return None
    if k.number("index_topk_blocks", "index_block_size"):  # raw scores by block: kept like other keys
        return Keep(kind="index keys of blocks", per_token=size, split="whole", formula=f"{size}")
    if pool > 1:
        return Keep(kind="index keys", per_token=size / pool, split="whole", formula=f"{size} for {pool} tokens")
    words = f"{size} B in e4m3 and a scale of {INDEX_SCALE} B"
    return Keep(kind="index keys", token_bytes=size + INDEX_SCALE, split="whole", formula=words)


def index_parameters(k: Keys) -> int:
    """The indexer's projections: queries from the query latent (or the input), one key head, one weight a head."""
    hidden, size, heads = k.number("hidden_size"), k.number("index_head_dim"), k.number("index_n_heads")
    source = k.number("q_lora_rank", default=hidden)
    return source * heads * size + hidden * size + hidden * heads


def compressed(k: Keys, rate: int) -> Mixer:
    """One shared key-value head whose tokens are pooled `rate` to one behind a window; below a rate of 32 with index
    keys, pooled alike. A rate of 0 is the window alone."""
    heads, _, size = heads_of(k)
    hidden, window = k.number("hidden_size"), k.number("sliding_window", default=128)
    down, groups, rank = k.number("q_lora_rank"), k.number("o_groups", default=1), k.number("o_lora_rank")
    matrices = hidden * down + down * heads * size + hidden * size + heads * size * rank + groups * rank * hidden
    keeps = [Keep(kind="window", window=size, tokens=window, split="whole", formula=f"{size}, {window} tokens")]
    if rate:
        keeps.append(Keep(kind="compressed", per_token=size / rate, split="whole", formula=f"{size} for {rate} tokens"))
        matrices += 2 * hidden * size
        if rate < 32 and k.number("index_head_dim"):
            index = k.number("index_head_dim")
            words = f"{index} for {rate} tokens"
            keeps.append(Keep(kind="index keys", per_token=index / rate, split="whole", formula=words))
            matrices += index_parameters(k) + hidden * index
    return Mixer(op="attention", keeps=tuple(keeps), parameters=matrices, heads=heads)
