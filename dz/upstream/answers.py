"""The inside of the upstream run: one loaded model answering cases with upstream's own code."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dz.core import jsonio
from dz.core.source import Source
from dz.errors import DzError, Refused
from dz.hub.stamp import code_hash
from dz.upstream.build import dtype_of
from dz.upstream.config import Architecture, architecture
from dz.upstream.loading import load_processor, load_tokenizer, takes_images
from dz.upstream.reference import Answer, Case, Facts, Order, Run
from dz.upstream.vocabulary import eos_token_ids

# What a case of upstream's code may raise; anything else ends the run.
_FAULTS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError, MemoryError)


class _Words:
    """Upstream's tokenizer and processor, loaded when first asked for."""

    def __init__(self, source: Source, trust: bool) -> None:
        self.processor: Any = None
        self.tokenizer: Any = None
        self.no_images = "" if takes_images(source) else "its configuration has no vision part"
        self.no_tokenizer = ""
        if not self.no_images:
            try:
                self.processor = load_processor(source, trust=trust)
                self.no_images = "" if self.processor is not None else "upstream has no image processor for it"
            except DzError as e:
                self.no_images = f"{e.what}: {e.why}"
        try:
            self.tokenizer = getattr(self.processor, "tokenizer", None) or load_tokenizer(source, trust=trust)
        except DzError as e:
            self.no_tokenizer = f"{e.what}: {e.why}"

    @property
    def no_chat(self) -> str:
        """Empty, or why there is no chat."""
        owners = (self.processor, self.tokenizer)
        if any(getattr(o, "chat_template", None) for o in owners):
            return ""
        return self.no_tokenizer or "the repository has no chat template"

    def prompt(self, case: Case) -> tuple[list[int], dict[str, Any]]:
        """The prompt's token ids and the processor's other tensors. Raises ValueError for a case without prompt."""
        if case.tokens:
            ids, rest = list(case.tokens), {}
        elif case.messages:
            ids, rest = self._chat(case.messages)
        elif case.text and self.tokenizer is not None:
            ids, rest = list(self.tokenizer(case.text)["input_ids"]), {}
        else:
            raise ValueError(self.no_tokenizer or f"case {case.id} has no prompt")
        if case.length:
            ids = (ids * -(-case.length // len(ids)))[: case.length]
        return ids, rest

    def _chat(self, messages: list[dict[str, Any]]) -> tuple[list[int], dict[str, Any]]:
        images = any(p.get("type") == "image" for m in messages if isinstance(m["content"], list) for p in m["content"])
        owner = self.processor if getattr(self.processor, "chat_template", None) or images else self.tokenizer
        if owner is None:
            raise ValueError(self.no_images if images else self.no_tokenizer)
        out = owner.apply_chat_template(
            _opened(messages), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        rest = {k: v for k, v in out.items() if k not in ("input_ids", "attention_mask") and images}
        return out["input_ids"][0].tolist(), rest


def _opened(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with image paths replaced by the opened pictures."""
    from PIL import Image

    def part(p: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image", "image": Image.open(p["path"]).convert("RGB")} if p.get("type") == "image" else p

    return [
        {**m, "content": [part(p) for p in m["content"]]} if isinstance(m["content"], list) else m for m in messages
    ]


def answer_all(order: Order, *, done: Callable[[str], None]) -> Run:
    """Load what the cases need, answer them in order, keep the dense logits. `done` is told each case's id.

    Raises Refused when the model does not load, loads incompletely, or its code is not the pinned one."""
    source = jsonio.from_builtins(Source, order.source, where="the reference's source")
    _refuse_changed_code(source)
    arch = architecture(source, trust=order.trust)
    words = _Words(source, order.trust)
    model, notes, begun = None, [], time.monotonic()
    if any(c.kind != "tokenize" for c in order.cases):
        model, notes = _load(source, arch, order)
    seconds = time.monotonic() - begun
    eos = eos_token_ids(source, words.tokenizer)
    answers, dense = [], {}
    for case in order.cases:
        answers.append(_answer(model, words, case, eos, dense))
        done(case.id)
    if dense:
        from safetensors.torch import save_file

        save_file(dense, order.dense)
    facts = _facts(arch, words, order, eos, notes, seconds)
    return Run(facts=facts, answers=answers, dense=order.dense if dense else "")


def _refuse_changed_code(source: Source) -> None:
    now = code_hash(source.path, (f.path for f in source.files if (source.path / f.path).is_file()))
    if now != source.code_hash:
        raise Refused(
            f"the code of {source.name} is not the pinned one",
            f"its digest is {now[:16] or 'empty'}, pinned is {source.code_hash[:16] or 'empty'}",
            f"dz fetch {source.name}",
            code="changed_code",
        )


def _load(source: Source, arch: Architecture, order: Order) -> tuple[Any, list[str]]:
    """The model, and what its loader left out. Weights that upstream would make up are a refusal: their outputs would
    be golden for nothing."""
    try:
        model, info = arch.cls.from_pretrained(
            source.folder,
            config=arch.config,
            dtype=dtype_of(order.dtype),
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as e:
        said = " ".join(f"{type(e).__name__}: {e}".split())[:600]
        raise Refused(f"upstream does not load {source.name}", said, "see the log", code="not_loaded") from e
    lost = [
        f"{key.removesuffix('_keys')}: {_some(info[key])}"
        for key in ("missing_keys", "mismatched_keys")
        if info.get(key)
    ]
    if lost:
        raise Refused(f"upstream loads {source.name} incompletely", "; ".join(lost), "mend it", code="incomplete")
    notes = [f"unexpected: {_some(info['unexpected_keys'])}"] if info.get("unexpected_keys") else []
    return model.eval().requires_grad_(False).to(order.device), notes


def _some(names: Any) -> str:
    listed = sorted(str(n) for n in names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _answer(model: Any, words: _Words, case: Case, eos: list[int], dense: dict[str, torch.Tensor]) -> Answer:
    begun = time.monotonic()
    prompt: list[int] = []
    try:
        prompt, media = words.prompt(case)
        if case.kind == "tokenize":
            return Answer(id=case.id, prompt=prompt)
        with torch.inference_mode():
            if case.kind == "score":
                ids = torch.tensor([prompt], device=model.device)
                dense[case.id] = model(input_ids=ids, use_cache=False).logits[0].float().cpu().contiguous()
                return Answer(id=case.id, prompt=prompt, seconds=time.monotonic() - begun)
            found = _generate(model, prompt, media, case, eos)
    except _FAULTS as e:
        said = " ".join(f"{type(e).__name__}: {e}".split())[:600]
        return Answer(id=case.id, prompt=prompt, seconds=time.monotonic() - begun, error=said)
    return Answer(id=case.id, prompt=prompt, seconds=time.monotonic() - begun, **found)


def _generate(model: Any, prompt: list[int], media: Mapping[str, Any], case: Case, eos: list[int]) -> dict[str, Any]:
    """Upstream's greedy generate with its cache, under no other setting of the repository's generation config."""
    from transformers import GenerationConfig

    pad = eos[0] if eos else 0
    model.generation_config = GenerationConfig(do_sample=False, num_beams=1, eos_token_id=eos or None, pad_token_id=pad)
    ids = torch.tensor([prompt], device=model.device)
    floats = {k: _placed(v, model) for k, v in media.items()}
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=case.max_tokens,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
        **floats,
    )
    rows = torch.stack([row[0].float().cpu() for row in out.logits])
    tokens = out.sequences[0, len(prompt) :].tolist()
    if not torch.isfinite(rows.max(-1).values).all():
        raise ValueError("upstream's own logits are not finite")
    best = torch.log_softmax(rows.double(), -1).topk(min(case.top, rows.shape[-1]), -1)
    pair = rows.topk(2, -1).values
    ended = bool(tokens) and tokens[-1] in eos
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return {
        "tokens": tokens[:-1] if ended else tokens,
        "stop_token": tokens[-1] if ended else None,
        "margins": (pair[:, 0] - pair[:, 1]).tolist(),
        "top": [list(zip(i, v, strict=True)) for i, v in pairs],
    }


def _placed(value: Any, model: Any) -> Any:
    """A processor's tensor on the model's device, floats in the model's dtype."""
    if isinstance(value, list | tuple):
        return [_placed(v, model) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)


def _facts(arch: Architecture, words: _Words, order: Order, eos: list[int], notes: list[str], seconds: float) -> Facts:
    from importlib.metadata import version

    text = arch.text_config
    return Facts(
        cls=arch.cls.__name__,
        runs=arch.runs,
        dtype=order.dtype,
        vocab_size=int(getattr(text, "vocab_size", 0) or 0),
        max_positions=int(getattr(text, "max_position_embeddings", 0) or 0),
        eos_token_ids=eos,
        vision=words.no_images,
        chat=words.no_chat,
        tokenizer=words.no_tokenizer,
        versions={name: version(name) for name in ("torch", "transformers", "tokenizers")},
        notes=notes,
        load_seconds=seconds,
    )
