"""Tiny random checkpoints of upstream's own classes, and what upstream generates from them.

`build(name, folder)` writes the checkpoint NAME (a key of MODELS) as `save_pretrained` would; `source(folder)` is the
folder as a Source; `prompts()` and `images(name)` are cases; `answers(name, folder, cases)` is what upstream generates,
greedily and one case at a time. Weights are random with non-zero biases and sinks, large enough that greedy output
varies. Tests get this module as the fixture `tiny`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB = 97
NEW = 12  # tokens generated for each case
LENGTHS = (1, 6, 17, 33)  # prompts: shorter and longer than every window, chunk and top-k below
IMAGE = 90  # the placeholder of an image; no prompt text uses tokens from here on
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
VISION = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Model:
    """Upstream's class (its configuration is named alike), the configuration's arguments, the tier that dz must find,
    the seed of the weights, how much larger than 1/sqrt(fan in) they are, and the deviation of the embeddings. Without
    `cached` its answers are those of uncached forwards: some versions of its `generate` lose tokens."""

    cls: str
    config: dict[str, Any]
    tier: str
    seed: int = 0
    gain: float = 1.6
    embed: float = 1.0
    vision: bool = False
    cached: bool = True


def _without(d: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in d.items() if k not in names}


MODELS = {
    "llama": Model("LlamaForCausalLM", {**TEXT, "attention_bias": True, "mlp_bias": True}, "gather", seed=1),
    "gpt_oss": Model(
        "GptOssForCausalLM", {**TEXT, **WINDOWED, "num_local_experts": 6, "num_experts_per_tok": 2}, "gather"
    ),
    "gemma2": Model(
        "Gemma2ForCausalLM",
        {**TEXT, **WINDOWED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 8.0, "attn_logit_softcapping": 5.0},
        "gather",
        seed=1,
    ),
    "llama4_text": Model(
        "Llama4ForCausalLM",
        {
            **TEXT,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "moe_layers": [1],
            "attention_chunk_size": 6,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
        },
        "gather",
        gain=2.0,
    ),
    "qwen3_moe": Model("Qwen3MoeForCausalLM", {**TEXT, **MOE}, "gather", gain=2.0),
    "deepseek_v3": Model("DeepseekV3ForCausalLM", {**TEXT, **MLA, "head_dim": 8}, "gather"),
    "deepseek_v32": Model(
        "DeepseekV32ForCausalLM",
        {**TEXT, **MLA, "index_topk": 5, "index_head_dim": 16, "index_n_heads": 32},
        "isolate",
        gain=2.0,
    ),
    "deepseek_v4": Model(
        "DeepseekV4ForCausalLM",
        {
            **_without(TEXT, "intermediate_size"),
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "q_lora_rank": 24,
            "o_lora_rank": 16,
            "o_groups": 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "index_topk": 2,
            "index_head_dim": 16,
            "index_n_heads": 32,
            "sliding_window": 6,
            "hc_mult": 2,
            "partial_rotary_factor": 0.5,
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "layer_types": [
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        },
        "isolate",
    ),
    "qwen3_next": Model(
        "Qwen3NextForCausalLM",
        {
            **TEXT,
            **MOE,
            **DELTA,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        "isolate",
        gain=1.2,
    ),
    "mamba2": Model(
        "Mamba2ForCausalLM",
        {
            **{k: TEXT[k] for k in ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")},
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 16,
            "chunk_size": 8,
            "tie_word_embeddings": False,
        },
        "isolate",
        gain=1.2,
    ),
    "minimax": Model(
        "MiniMaxForCausalLM",
        {
            **TEXT,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "block_size": 8,
        },
        "isolate",
        gain=2.0,
    ),
    "mamba": Model(
        "MambaForCausalLM",
        {
            **{k: TEXT[k] for k in ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")},
            "num_hidden_layers": 3,
            "state_size": 8,
            "time_step_rank": 4,
            "tie_word_embeddings": False,
        },
        "isolate",
        gain=1.2,
    ),
    "opt": Model(
        "OPTForCausalLM",
        {
            **{k: TEXT[k] for k in ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")},
            "num_hidden_layers": 3,
            "ffn_dim": 48,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 24,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
        "gather",
        seed=1,
        gain=2.0,
    ),
    "gemma3n_text": Model(
        "Gemma3nForCausalLM",
        {
            **TEXT,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "sliding_window": 6,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
        "isolate",
        gain=2.0,
    ),
    "lfm2": Model(
        "Lfm2ForCausalLM",
        {
            **TEXT,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
        "isolate",
        gain=2.0,
    ),
    "longrope": Model(
        "Phi3ForCausalLM",
        {
            **TEXT,
            "original_max_position_embeddings": 20,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": 20,
                "factor": 12.8,
            },
        },
        "isolate",
        gain=2.0,
        cached=False,
    ),
    "dynamic": Model(
        "LlamaForCausalLM",
        {
            **TEXT,
            "max_position_embeddings": 20,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        },
        "isolate",
    ),
    "qwen3_vl": Model(
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            },
            "vision_config": {
                **_without(VISION, "num_hidden_layers", "num_attention_heads"),
                "depth": 2,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 32,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            "image_token_id": IMAGE,
            "video_token_id": IMAGE + 1,
            "vision_start_token_id": IMAGE + 2,
            "vision_end_token_id": IMAGE + 3,
            "tie_word_embeddings": False,
        },
        "gather",
        vision=True,
    ),
    "gemma3": Model(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**TEXT, **WINDOWED, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
            "vision_config": {**VISION, "image_size": 16, "patch_size": 4},
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": IMAGE + 2,
            "eoi_token_index": IMAGE + 3,
            "tie_word_embeddings": True,
        },
        "gather",
        seed=34,
        gain=2.5,
        embed=0.03,
        vision=True,
    ),
    "llava": Model(
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": 8, "patch_size": 4},
            "image_token_index": IMAGE,
            "tie_word_embeddings": False,
        },
        "gather",
        vision=True,
    ),
}
TEXT_MODELS = [n for n, m in MODELS.items() if not m.vision]
VISION_MODELS = [n for n, m in MODELS.items() if m.vision]


@dataclass(frozen=True)
class Case:
    """Prompt tokens, and a processor's tensors as upstream's `generate` takes them."""

    tokens: list[int]
    media: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """Upstream's greedy tokens, and the smallest gap between its best and its second logit."""

    tokens: list[int]
    margin: float


def build(name: str, folder: Path, *, shard: str = "5GB", **changes: Any) -> Path:
    """The checkpoint `name` in `folder`, in shards of at most `shard`; `changes` replace arguments of its
    configuration."""
    import transformers

    spec = MODELS[name]
    cls = getattr(transformers, spec.cls)
    config = cls.config_class(**{**spec.config, **changes})
    torch.manual_seed(spec.seed)
    model = cls(config).float().eval()
    randomise(model, spec.gain, spec.embed, spec.seed)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def randomise(model: Any, gain: float, embed: float, seed: int) -> None:
    """Weights that make a tiny model's greedy output vary."""
    random = torch.Generator().manual_seed(seed + 1)
    noise = lambda t: torch.randn(t.shape, generator=random)  # noqa: E731
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if id(p) in tables:
                p.copy_(noise(p) * embed)
            elif p.dim() > 1:
                fan = p[0].numel() if p.dim() != 3 or "conv" in name else (p.shape[1] * p.shape[2]) ** 0.5
                p.copy_(noise(p) * min(gain * fan**-0.5, 0.7))
            else:
                p.add_(noise(p) * 0.2)
        for name, b in model.named_buffers():
            if name.endswith("correction_bias"):
                b.add_(noise(b) * 0.1)
            elif name.endswith("tid2eid"):
                experts = model.config.get_text_config().n_routed_experts
                rows = [torch.randperm(experts, generator=random)[: b.shape[-1]] for _ in range(b.shape[0])]
                b.copy_(torch.stack(rows).to(b.dtype))
        head = model.get_output_embeddings().weight
        if id(head) not in tables:
            head.copy_(noise(head) * 3 * head.shape[1] ** -0.5)


def source(folder: Path) -> Any:
    """The folder as a Source, not through a lock."""
    from dz.core.source import FileEntry, Source
    from dz.hub.stamp import code_hash

    files = tuple(FileEntry(path=p.name, size=p.stat().st_size) for p in sorted(folder.iterdir()) if p.is_file())
    pin = code_hash(folder, (f.path for f in files))
    return Source(name=str(folder), folder=str(folder), commit="", rev8="0a1b2c3d", code_hash=pin, files=files)


def prompts(seed: int = 7) -> list[Case]:
    """One text prompt of each of LENGTHS."""
    random = torch.Generator().manual_seed(seed)
    return [Case(torch.randint(3, IMAGE, (n,), generator=random).tolist(), {}) for n in LENGTHS]


def images(name: str) -> list[Case]:
    """Prompts with one and with two images (two sizes where the model takes sizes), in the middle of text."""
    random = torch.Generator().manual_seed(11)
    text = lambda n: torch.randint(3, IMAGE, (n,), generator=random).tolist()  # noqa: E731
    pixels = lambda *shape: torch.randn(shape, generator=random)  # noqa: E731
    if name == "qwen3_vl":
        grids = [torch.tensor([[1, 4, 4]]), torch.tensor([[1, 4, 6], [1, 2, 4]])]
        out = []
        for grid in grids:
            tokens = text(5)
            for t, h, w in grid.tolist():
                tokens += [IMAGE + 2, *[IMAGE] * (t * h * w // 4), IMAGE + 3, *text(3)]
            media = {"pixel_values": pixels(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": grid}
            out.append(Case(tokens, {**media, "mm_token_type_ids": _kinds(tokens)}))
        return out
    size, each = (16, 4) if name == "gemma3" else (8, 4)
    out = []
    for n in (1, 2):
        tokens = text(4)
        for _ in range(n):
            tokens += [IMAGE + 2, *[IMAGE] * each, IMAGE + 3, *text(3)]
        kinds = {"token_type_ids": _kinds(tokens)} if name == "gemma3" else {}
        out.append(Case(tokens, {"pixel_values": pixels(n, 3, size, size), **kinds}))
    return out


def _kinds(tokens: list[int]) -> torch.Tensor:
    return torch.tensor([[int(t == IMAGE) for t in tokens]])


def upstream(folder: Path) -> Any:
    """Upstream's model of a folder, loaded by `from_pretrained`, float32."""
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()


def answers(name: str, folder: Path, cases: list[Case]) -> list[Answer]:
    """What must come out for each case of the checkpoint `name` in `folder`."""
    return generate(folder, cases) if MODELS[name].cached else [_uncached(upstream(folder), c) for c in cases]


def _uncached(model: Any, case: Case) -> Answer:
    tokens, margins = list(case.tokens), []
    for _ in range(NEW):
        with torch.no_grad():
            best = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return Answer(tokens[len(case.tokens) :], min(margins))


def generate(folder: Path, cases: list[Case], new: int = NEW) -> list[Answer]:
    """What upstream generates for each case alone: greedy, with its cache, `new` tokens."""
    model = upstream(folder)
    model.generation_config.eos_token_id = None
    out = []
    for case in cases:
        ids = torch.tensor([case.tokens])
        with torch.no_grad():
            got = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **case.media,
                max_new_tokens=new,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=0,
            )
        best = torch.stack([x[0] for x in got.logits]).topk(2).values
        out.append(Answer(got.sequences[0][len(case.tokens) :].tolist(), float((best[:, 0] - best[:, 1]).min())))
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder with one weight file, in memory of their own."""
    from safetensors.torch import load

    return load((folder / "model.safetensors").read_bytes())


def rewrite(folder: Path, changed: dict[str, torch.Tensor | None]) -> Any:
    """Add, replace or (None) drop tensors of a folder with one weight file; returns its Source."""
    from safetensors.torch import save_file

    held = {**tensors(folder), **changed}
    kept = {k: v.contiguous() for k, v in held.items() if v is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return source(folder)
