"""Tiny checkpoints for tests: a configuration by hand, random weights under the names that upstream's class has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

COMMON = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, **COMMON}
GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    **COMMON,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 6,
    "query_pre_attn_scalar": 8,
}
HYBRID = {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    **COMMON,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}


def write(folder: Path, config: dict[str, Any], *, weights: bool = True, seed: int = 0) -> Path:
    """A repository of `config` in `folder`, with random weights in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not weights:
        return folder
    from dz.upstream.build import build_meta

    generator = torch.Generator().manual_seed(seed)
    built = build_meta(source(folder), trust=False)
    tied = set(getattr(built.model, "all_tied_weights_keys", None) or {})
    tensors = {}
    for name, like in built.model.state_dict().items():
        if name not in tied:
            n = torch.randn(tuple(like.shape), generator=generator)
            tensors[name] = 1 + 0.2 * n if like.dim() == 1 else n * like.shape[-1] ** -0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def source(folder: Path) -> Any:
    """The folder as a Source, not through a lock."""
    from dz.core.source import FileEntry, Source
    from dz.hub.stamp import code_hash

    files = tuple(FileEntry(path=p.name, size=p.stat().st_size) for p in sorted(folder.iterdir()))
    code = [f.path for f in files if f.path.endswith(".py")]
    pin = code_hash(folder, code) if code else ""
    return Source(name=str(folder), folder=str(folder), commit="", rev8="0a1b2c3d", code_hash=pin, files=files)


def headers(folder: Path) -> Any:
    """The headers of the folder's one weight file."""
    from dz.core.headers import read_header

    return dict(read_header(folder / "model.safetensors").tensors)
