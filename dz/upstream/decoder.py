"""Calling upstream's decoder: which arguments it takes, its layers seen from outside, its head for chosen tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from dz.errors import Refused
from dz.upstream.build import Built
from dz.upstream.cache import CACHE_NAMES, bytes_in, new_cache
from dz.upstream.generation import own_cache
from dz.upstream.rope import Snapshot, follows_from

# What upstream's code raises when it is called as it does not expect.
FAILURES = (
    RuntimeError,
    NotImplementedError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
)


class Decoder:
    """Upstream's decoder of a built model, called on hidden positions of one or more sequences."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.module: nn.Module = built.decoder
        self.parameters = inspect.signature(type(self.module).forward).parameters
        self.cache_name = cache_argument(self.module)
        if self.cache_name is None:
            raise Refused(
                f"{type(self.module).__name__} takes no cache",
                f"its forward has none of {', '.join(CACHE_NAMES)}",
                "dz cannot continue a sequence without one; report it with the model's name",
                code="no_cache",
            )
        self.fresh: Snapshot | None = None
        self.new_cache: Callable[[], Any] = lambda: new_cache(built.text_config)

    def settle(self) -> None:
        """Find out, once the weights are in place, how this decoder wants to be called.

        From then on each call starts from the state that the modules have now, whatever earlier calls leave: some ropes
        rescale to the longest position that they have seen. `new_cache` makes an empty cache for a sequence, of the
        model's own class where it takes no other."""
        if follows_from(self.built.text_config) is not None:
            self.fresh = Snapshot(m for m in self.module.modules() if m._non_persistent_buffers_set)
        with torch.no_grad():
            if not self._takes_cache(self.new_cache()):
                self.new_cache = self._own() or self.new_cache

    def _takes_cache(self, cache: Any) -> bool:
        """Whether a call runs with it and leaves something in it: some decoders go on with one of their own."""
        empty = bytes_in(cache)
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(self.module.parameters()).device)
        try:
            self(cache=cache, positions=torch.arange(2, device=ids.device)[None], ids=ids)
        except FAILURES:
            return False
        return bytes_in(cache) > empty

    def _own(self) -> Callable[[], Any] | None:
        try:
            make = own_cache(self.built.model, self.module)
            return make if make is not None and self._takes_cache(make()) else None
        except FAILURES:
            return None  # then the first real call tells what is the matter

    def __call__(
        self,
        *,
        cache: Any,
        positions: torch.Tensor | None,
        ids: torch.Tensor | None = None,
        mask: Any = None,
        given: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Hidden states [B, S, D] after the final norm. `ids` [B, S]; `positions` [B, S] or [R, B, S]; `given` are
        further arguments captured from upstream's own call (embeddings and whatever belongs to images)."""
        if self.fresh is not None:
            self.fresh.restore()
        args: dict[str, Any] = dict(given or {})
        if ids is not None:
            args["input_ids"] = ids
        args[str(self.cache_name)] = cache
        args["use_cache"] = True
        if positions is not None and self._takes("position_ids"):
            args["position_ids"] = positions
        if mask is not None or "attention_mask" not in args:
            args["attention_mask"] = mask
        out = self.module(**args)
        return out[0] if isinstance(out, tuple) else out.last_hidden_state

    def _takes(self, name: str) -> bool:
        kinds = (inspect.Parameter.VAR_KEYWORD,)
        return name in self.parameters or any(p.kind in kinds for p in self.parameters.values())


def cache_argument(module: nn.Module) -> str | None:
    """The name of the cache argument of a module's forward, or None."""
    try:
        names = inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):
        return None
    return next((n for n in CACHE_NAMES if n in names), None)


def mixers(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """A decoder layer's token mixers: its children (or items of a list among them) whose forward takes a cache."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in layer.named_children():
        items = (
            [(f"{name}.{k}", m) for k, m in child.named_children()]
            if isinstance(child, nn.ModuleList)
            else [(name, child)]
        )
        found += [(n, m) for n, m in items if cache_argument(m)]
    return found


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` with another forward, put back afterwards whatever happens."""
    had, before = "forward" in vars(module), vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if had:
            module.forward = before  # type: ignore[assignment]
        else:
            del module.forward


class _Answer:
    """Stands for the base model's output: hidden states, and None for whatever else upstream's head looks at."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Head:
    """Logits by upstream's own causal class: its forward runs with the base model's answer put in its place, so that
    soft caps, scales and heads of any kind are upstream's. `bases` are the modules that lead to the decoder: some
    classes call one, some another."""

    def __init__(self, built: Built) -> None:
        self.model = built.model
        self.bases = [
            m
            for name, m in built.model.named_modules()
            if name and any(inner is built.decoder for inner in m.modules()) and not isinstance(m, nn.ModuleList)
        ]
        if not self.bases:
            raise Refused(
                f"{built.cls} has no base model",
                "its decoder lies in none of its children",
                "report it with the model's name",
                code="no_base",
            )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, V] float32 logits of hidden states [N, D]."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        with ExitStack() as stack:
            for base in self.bases:
                stack.enter_context(replaced(base, lambda *args, **kwargs: _Answer(hidden[None])))
            out = self.model(input_ids=ids, use_cache=False)
        return out.logits[0].float()
