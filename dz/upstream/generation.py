"""Upstream's own `generate`, and the cache that it would use for a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dz.upstream.cache import CACHE_NAMES


def generate(model: Any, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [k], logits [k, V] float32) of upstream's greedy answer to `ids` [1, n]: k is `new`, or less where a text
    ends."""
    from transformers import GenerationConfig

    wish = GenerationConfig(max_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0)
    got = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=wish,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return got.sequences[0, ids.shape[1] :], torch.cat(got.logits).float()


def own_cache(model: Any, decoder: Any) -> Callable[[], Any] | None:
    """How to make an empty cache of a class that the model brings with it; None when it brings none.

    There are two ways to one: the model's preparation of inputs makes it, or the first forward without any."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    prepared = _prepared(model, ids)
    if prepared() is not None:
        return prepared
    made = _held(decoder(input_ids=ids, use_cache=True))
    if made is None:
        return None
    kind, config = type(made), model.config.get_text_config(decoder=True)
    return (lambda: kind(config)) if "config" in inspect.signature(kind.__init__).parameters else kind


def _prepared(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    prepare = model.prepare_inputs_for_generation
    known = inspect.signature(prepare).parameters
    more = {"cache_position": torch.arange(1, device=ids.device)} if "cache_position" in known else {}
    return lambda: _held(prepare(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **more))


def _held(answer: Any) -> Any:
    get = answer.get if isinstance(answer, dict) else lambda name: getattr(answer, name, None)
    return next((c for name in CACHE_NAMES if (c := get(name)) is not None), None)
