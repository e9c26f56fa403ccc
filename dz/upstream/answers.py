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
from dz.upstream.reference import Answer, Ask, Case, Facts, Order, Run
from dz.upstream.vocabulary import eos_token_ids

# What a case of upstream's code may raise; anything else ends the run.
_FAULTS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError, MemoryError)


class _Words:
    """Upstream's tokenizer and processor, loaded when first asked for."""

    def __init__(self, source: Source, trust: bool) -> None:
        self.processor: Any = None
        self.tokenizer: Any = None
        self.images = takes_images(source)
        self.no_images = "" if self.images else "the repository is not for pictures"
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


class Upstream:
    """One source under one order. The model is loaded when a case needs it.

    Raises Refused when the code is not the pinned one, or the model does not load, or loads incompletely."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._source = jsonio.from_builtins(Source, order.source, where="the reference's source")
        _refuse_changed_code(self._source)
        self._arch = architecture(self._source, trust=order.trust)
        self._words = _Words(self._source, order.trust)
        self._eos = eos_token_ids(self._source, self._words.tokenizer)
        self._model: Any = None
        self._notes: list[str] = []
        self._seconds = 0.0

    def answer(self, ask: Ask, *, done: Callable[[str], None]) -> Run:
        """Answer cases in order and keep the dense logits. `done` is told each case's id."""
        if self._model is None and any(c.kind != "tokenize" for c in ask.cases):
            begun = time.monotonic()
            self._model, self._notes = _load(self._source, self._arch, self._order)
            self._seconds = time.monotonic() - begun
        answers: list[Answer] = []
        dense: dict[str, torch.Tensor] = {}
        for case in ask.cases:
            answers.append(_answer(self._model, self._words, case, self._eos, dense))
            done(case.id)
        if dense:
            from safetensors.torch import save_file

            save_file(dense, ask.dense)
        facts = _facts(self._arch, self._words, self._order, self._eos, self._notes, self._seconds)
        return Run(facts=facts, answers=answers, dense=ask.dense if dense else "")


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
            ignore_mismatched_sizes=True,  # not ignored: refused below, with their names
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
                rows = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
                if case.dense:
                    dense[case.id] = rows.contiguous()
                top, margins = _best(rows[case.start :], case.top)
                return Answer(id=case.id, prompt=prompt, margins=margins, top=top, seconds=time.monotonic() - begun)
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
    top, margins = _best(rows, case.top)
    ended = bool(tokens) and tokens[-1] in eos
    stop = tokens.pop() if ended else None
    return {"tokens": tokens, "stop_token": stop, "margins": margins, "top": top}


def _best(rows: torch.Tensor, count: int) -> tuple[list[list[tuple[int, float]]], list[float]]:
    """For logits [N, V]: the `count` likeliest (token, log probability) of each row and its top-1 margin."""
    if not torch.isfinite(rows.max(-1).values).all():
        raise ValueError("upstream's own logits are not finite")
    best = torch.log_softmax(rows.double(), -1).topk(min(count, rows.shape[-1]), -1)
    pair = rows.topk(2, -1).values
    top = [list(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return top, (pair[:, 0] - pair[:, 1]).tolist()


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
        images=words.images,
        vision=words.no_images,
        chat=words.no_chat,
        tokenizer=words.no_tokenizer,
        versions={name: version(name) for name in ("torch", "transformers", "tokenizers")},
        notes=notes,
        load_seconds=seconds,
    )
