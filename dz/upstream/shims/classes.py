"""Changes of a repository's own classes after they are imported, where today's upstream calls them differently."""

from __future__ import annotations

import functools
import inspect
from typing import Any

_NEW = "cache"
_OLD = ("past_key_values", "cache_params")


def tied_weights(cls: Any) -> bool:
    """`_tied_weights_keys` as a list says which parameters are tied; today's dictionary says to what. 4.x tied them to
    the input embeddings, so the model is asked where those are."""
    listed = cls.__dict__.get("_tied_weights_keys")
    if not isinstance(listed, list | tuple) or "get_expanded_tied_weights_keys" in cls.__dict__:
        return False

    def get_expanded_tied_weights_keys(self: Any, all_submodels: bool = False) -> dict[str, str]:
        """{tied parameter: the parameter it is tied to} of this model."""
        if not getattr(self.config, "tie_word_embeddings", False):
            return {}
        table = self.get_input_embeddings()
        source = next(n for n, m in self.named_modules() if m is table)
        names = {n for n, _ in self.named_parameters(remove_duplicate=False)}
        return {name: f"{source}.weight" for name in listed if name in names and name != f"{source}.weight"}

    cls._tied_weights_keys = None
    cls.get_expanded_tied_weights_keys = get_expanded_tied_weights_keys
    return True


def generation(cls: Any) -> bool:
    """Upstream's base class no longer generates; a class that prepares inputs for generation gets the mixin."""
    from transformers import GenerationMixin

    if issubclass(cls, GenerationMixin) or "prepare_inputs_for_generation" not in cls.__dict__:
        return False
    cls.__bases__ = (*cls.__bases__, GenerationMixin)
    return True


def cache_argument(cls: Any) -> bool:
    """`generate` hands the cache over under another name than the class takes it: the class's forward and its
    preparation of inputs take it under both."""
    from transformers import GenerationMixin

    if not issubclass(cls, GenerationMixin) or not _called(GenerationMixin):
        return False
    changed = False
    for name in ("forward", "prepare_inputs_for_generation"):
        method = cls.__dict__.get(name)
        old = _old_name(method)
        if method is not None and old:
            setattr(cls, name, _renaming(method, old, prepares=name != "forward"))
            changed = True
    return changed


def full_layers(config: Any) -> bool:
    """Let the configuration name every layer's kind as full attention, unless it names them itself."""
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", None)
    if getattr(text, "layer_types", None) is not None or not isinstance(count, int):
        return False
    text.layer_types = ["full_attention"] * count
    return True


def rotary_function(cls: Any) -> bool:
    """Upstream computes the frequencies of a plain rope again after a load, by a function that it looks for on the
    class; classes of 4.x have it in the table of functions."""
    from dz.upstream.shims.rope import plain

    if "RotaryEmbedding" not in cls.__name__ or hasattr(cls, "compute_default_rope_parameters"):
        return False
    cls.compute_default_rope_parameters = staticmethod(plain)
    return True


def _called(mixin: Any) -> bool:
    """Whether the installed `generate` prepares inputs in another way than that of 4.x."""
    names = inspect.signature(mixin.prepare_inputs_for_generation).parameters
    return _NEW in names or _NEWER[0] in names


def _old_name(method: Any) -> str:
    """The old name that a method takes its cache by; empty if it takes the new one, or none."""
    if method is None:
        return ""
    names = inspect.signature(method).parameters
    return "" if _NEW in names else next((o for o in _OLD if o in names), "")


def _renaming(method: Any, old: str, *, prepares: bool) -> Any:
    names = inspect.signature(method).parameters

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **given: Any) -> Any:
        if _NEW in given:
            given[old] = given.pop(_NEW)
        if prepares:
            given = _as_before(given, args, names, old)
        return method(self, *args, **given)

    return wrapped


def _as_before(given: dict[str, Any], args: Any, names: Any, old: str) -> dict[str, Any]:
    """What `generate` of 4.x told a class's preparation of inputs: always a mask and, where it is asked for, the places
    of the new tokens; never the positions of whole rows."""
    import torch

    ids = given.get("input_ids", args[0] if args else None)
    given.pop("position_ids", None)
    if "attention_mask" in names and given.get("attention_mask") is None and ids is not None:
        given["attention_mask"] = torch.ones_like(ids)
    if "cache_position" in names and given.get("cache_position") is None and ids is not None:
        given["cache_position"] = _positions(ids, given.get(old))
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values()):
        return given
    return {k: v for k, v in given.items() if k in names or k not in _NEWER}


_NEWER = ("next_sequence_length", "is_first_iteration")  # what today's generate tells besides


def _positions(ids: Any, cache: Any) -> Any:
    """[S] of the tokens of ids [B, T] that the cache does not hold yet."""
    import torch

    past = 0 if cache is None else int(cache.get_seq_length())
    return torch.arange(past, ids.shape[1], device=ids.device)
