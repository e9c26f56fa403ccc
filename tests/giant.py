"""Repositories of any size that hold headers and no weights: sparse files with real safetensors headers.

`write(folder, config, shards)` writes one; `trillion(...)` is the shape of a model of 2.78 T parameters in half a
million tensors (delta-rule and latent-attention layers, latent MXFP4 experts, residual mixing); `scrambled(seed)` is
one of random names and sizes. Tests get this module as the fixture `giant`."""

from __future__ import annotations

import json
import random
import struct
from math import prod
from pathlib import Path
from typing import Any

from dz.core.headers import BITS

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a file."""
    return (prod(shape) * BITS[dtype] + 7) // 8


def write(folder: Path, config: dict[str, Any], shards: list[Tensors]) -> int:
    """Write config.json, an index and the shards as sparse files; returns the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map, total = {}, 0
    for n, tensors in enumerate(shards, 1):
        name = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for tensor, (dtype, shape) in tensors.items():
            end = at + size_of(dtype, shape)
            header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        with (folder / name).open("wb") as f:
            f.write(struct.pack("<Q", len(raw)) + raw)
            f.truncate(8 + len(raw) + at)
        weight_map |= dict.fromkeys(tensors, name)
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, separators=(",", ":")))
    return total


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}}},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
}


def trillion_config(layers: int = 93, experts: int = 896) -> dict[str, Any]:
    """The configuration of `trillion`."""
    full = [*range(4, layers, 4), layers] if layers % 4 else [*range(4, layers + 1, 4)]
    return {
        "model_type": "never_seen",
        "architectures": ["NeverSeenForCausalLM"],
        "text_config": {
            "model_type": "never_seen_text",
            "dtype": "bfloat16",
            "hidden_size": 7168,
            "num_hidden_layers": layers,
            "vocab_size": 163840,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
                "kda_layers": [i for i in range(1, layers + 1) if i not in full],
                "full_attn_layers": full,
            },
            "num_experts": experts,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584,
            "first_k_dense_replace": 1,
            "intermediate_size": 33792,
            "attn_res_block_size": 12,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "max_position_embeddings": 1048576,
            "quantization_config": PACKED,
        },
    }


CODE = Path(__file__).with_name("giant_code")  # a class for `trillion`, as a publisher would write it


def with_code(folder: Path) -> None:
    """Put the class beside a repository that `write` wrote, and name it in config.json."""
    for file in CODE.glob("*.py"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_never_seen.NeverSeenConfig",
        "AutoModelForCausalLM": "modeling_never_seen.NeverSeenForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))


def _packed(name: str, n: int, k: int) -> Tensors:
    return {f"{name}.weight_packed": ("U8", (n, k // 2)), f"{name}.weight_scale": ("U8", (n, k // 32))}


def _layer(c: dict[str, Any], i: int) -> Tensors:
    """One decoder layer of `trillion`, under names as publishers give them."""
    p, h, heads = f"language_model.model.layers.{i}", c["hidden_size"], c["num_attention_heads"]
    inner = heads * 128
    out: Tensors = {f"{p}.{n}.weight": ("BF16", (h,)) for n in ("input_layernorm", "post_attention_layernorm")}
    for n in ("attn_res", "mlp_res"):
        out |= {f"{p}.{n}.norm.weight": ("BF16", (h,)), f"{p}.{n}.query": ("BF16", (h,))}
    a = f"{p}.self_attn"
    if i + 1 in c["linear_attn_config"]["kda_layers"]:
        out |= {f"{a}.{n}_proj.weight": ("BF16", (inner, h)) for n in "qkvg"}
        out |= {f"{a}.{n}_conv1d.weight": ("BF16", (inner, 1, 4)) for n in "qkv"}
        out |= {f"{a}.f_a_proj.weight": ("BF16", (128, h)), f"{a}.f_b_proj.weight": ("BF16", (inner, 128))}
        out |= {f"{a}.b_proj.weight": ("BF16", (heads, h)), f"{a}.A_log": ("F32", (heads,))}
        out |= {f"{a}.dt_bias": ("F32", (inner,)), f"{a}.o_norm.weight": ("BF16", (128,))}
    else:
        out |= {f"{a}.q_a_proj.weight": ("BF16", (1536, h)), f"{a}.q_a_layernorm.weight": ("BF16", (1536,))}
        out |= {f"{a}.q_b_proj.weight": ("BF16", (heads * 192, 1536)), f"{a}.g_proj.weight": ("BF16", (inner, h))}
        out |= {f"{a}.kv_a_proj_with_mqa.weight": ("BF16", (576, h)), f"{a}.kv_a_layernorm.weight": ("BF16", (512,))}
        out |= {f"{a}.kv_b_proj.weight": ("BF16", (heads * 256, 512))}
    out[f"{a}.o_proj.weight"] = ("BF16", (h, inner))
    if i < c["first_k_dense_replace"]:
        w = c["intermediate_size"]
        out |= {f"{p}.mlp.{n}_proj.weight": ("BF16", (w, h)) for n in ("gate", "up")}
        return out | {f"{p}.mlp.down_proj.weight": ("BF16", (h, w))}
    m, e, latent, w = f"{p}.block_sparse_moe", c["num_experts"], c["routed_expert_hidden_size"], 3072
    out |= {f"{m}.gate.weight": ("BF16", (e, h)), f"{m}.gate.e_score_correction_bias": ("F32", (e,))}
    out |= {f"{m}.latent_down.weight": ("BF16", (latent, h)), f"{m}.latent_up.weight": ("BF16", (h, latent))}
    out |= {f"{m}.latent_norm.weight": ("BF16", (latent,))}
    out |= {f"{m}.shared_experts.{n}_proj.weight": ("BF16", (2 * w, h)) for n in ("gate", "up")}
    out |= {f"{m}.shared_experts.down_proj.weight": ("BF16", (h, 2 * w))}
    for x in range(e):
        q = f"{m}.experts.{x}"
        out |= _packed(f"{q}.w1", w, latent) | _packed(f"{q}.w2", latent, w) | _packed(f"{q}.w3", w, latent)
    return out


def trillion(layers: int = 93, experts: int = 896) -> tuple[dict[str, Any], list[Tensors]]:
    """(configuration, shards): a shard a layer, and one for the rest."""
    config = trillion_config(layers, experts)
    c = config["text_config"]
    h, v = c["hidden_size"], c["vocab_size"]
    rest: Tensors = {
        "language_model.model.embed_tokens.weight": ("BF16", (v, h)),
        "language_model.model.norm.weight": ("BF16", (h,)),
        "language_model.lm_head.weight": ("BF16", (v, h)),
    }
    return config, [rest, *(_layer(c, i) for i in range(layers))]


WORDS = (
    *("root", "stack", "attn", "moe", "pool", "q", "k", "val", "o", "gate", "up", "down", "router"),
    *("n1", "n2", "emb", "top", "last", "kind"),
)


def _scramble(seed: int) -> tuple[dict[str, int], dict[str, str]]:
    """(random sizes, a random word for each of WORDS)."""
    r = random.Random(seed)
    sizes = {"h": 64 * r.randint(20, 40), "v": 64 * r.randint(500, 900), "head": r.choice((64, 96, 128))}
    sizes |= {"heads": 16, "shared": r.choice((2, 4)), "w": 64 * r.randint(10, 30)}
    word = lambda: "".join(r.choice("bdfgklmnprstvz") + r.choice("aeiou") for _ in range(r.randint(3, 4)))  # noqa: E731
    return sizes, dict(zip(WORDS, dict.fromkeys(word() for _ in range(90)), strict=False))


def scrambled_code(folder: Path, seed: int) -> None:
    """A class for `scrambled(seed)` under the same random names, put beside it and named in its config.json."""
    _, words = _scramble(seed)
    text = (CODE / "scrambled.txt").read_text()
    for name, word in words.items():
        text = text.replace(f"<{name}>", word)
    (folder / "modeling_scrambled.py").write_text(text)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_scrambled.ScrambledConfig",
        "AutoModelForCausalLM": "modeling_scrambled.ScrambledForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))


def scrambled(seed: int, *, layers: int = 40, experts: int = 160) -> tuple[dict[str, Any], list[Tensors]]:
    """(configuration, shards) of random names and sizes: grouped attention, routed FP8 experts in blocks of 128."""
    sizes, words = _scramble(seed)
    h, v, head, heads, shared, w = (sizes[n] for n in ("h", "v", "head", "heads", "shared", "w"))
    root, stack, attn, moe, pool, q, k, val, o, gate, up, down, router, n1, n2, emb, top, last, kind = words.values()
    rest: Tensors = {
        f"{root}.{emb}.weight": ("BF16", (v, h)),
        f"{root}.{last}.weight": ("BF16", (h,)),
        f"{top}.weight": ("BF16", (v, h)),
    }
    shards = [rest]
    for i in range(layers):
        p = f"{root}.{stack}.{i}"
        own: Tensors = {f"{p}.{n1}.weight": ("BF16", (h,)), f"{p}.{n2}.weight": ("BF16", (h,))}
        for name, rows in ((q, heads * head), (k, shared * head), (val, shared * head)):
            own[f"{p}.{attn}.{name}.weight"] = ("BF16", (rows, h))
        own[f"{p}.{attn}.{o}.weight"] = ("BF16", (h, heads * head))
        own[f"{p}.{moe}.{router}.weight"] = ("BF16", (experts, h))
        for x in range(experts):
            for name, (rows, columns) in ((gate, (w, h)), (up, (w, h)), (down, (h, w))):
                own[f"{p}.{moe}.{pool}.{x}.{name}.weight"] = ("F8_E4M3", (rows, columns))
                scales = (-(-rows // 128), -(-columns // 128))
                own[f"{p}.{moe}.{pool}.{x}.{name}.weight_scale_inv"] = ("F32", scales)
        shards.append(own)
    return {
        "model_type": kind,
        "dtype": "bfloat16",
        "hidden_size": h,
        "num_hidden_layers": layers,
        "vocab_size": v,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": head,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": w,
        "max_position_embeddings": 65536,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }, shards
