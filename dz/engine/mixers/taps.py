"""Decoder layers and token mixers seen from outside: one switchable handler round each call of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from dz.upstream.decoder import Decoder, mixers


class Handler(Protocol):
    """What a tier does round upstream's layers and mixers. `call(hidden, named)` runs upstream's own forward."""

    def layer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """A decoder layer is called."""
        ...

    def mixer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """A token mixer of layer `index` is called."""
        ...


Call = Callable[[torch.Tensor, dict[str, Any]], Any]


class Taps:
    """Installed once on a decoder; with no handler every call goes straight to upstream."""

    def __init__(self, decoder: Decoder) -> None:
        self.handler: Handler | None = None
        self.count = 0
        for index, layer in enumerate(decoder.built.layers):
            for _, mixer in mixers(layer):
                self._wrap(mixer, index, "mixer")
                self.count += 1
            self._wrap(layer, index, "layer")

    @staticmethod
    def mixed(layer: nn.Module) -> bool:
        """Whether a decoder layer has a token mixer (layers of an MLP alone have none)."""
        return bool(mixers(layer))

    @contextmanager
    def using(self, handler: Handler | None) -> Iterator[None]:
        """`handler` sees the calls made inside."""
        before, self.handler = self.handler, handler
        try:
            yield
        finally:
            self.handler = before

    def _wrap(self, module: nn.Module, index: int, kind: str) -> None:
        upstream = module.forward
        names = list(inspect.signature(upstream).parameters)
        first = names[0]

        def call(hidden: torch.Tensor, named: dict[str, Any]) -> Any:
            return upstream(hidden, **named)

        def forward(*args: Any, **kwargs: Any) -> Any:
            handler = self.handler
            if handler is None:
                return upstream(*args, **kwargs)
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            return getattr(handler, kind)(index, call, named.pop(first), named)

        module.forward = forward  # type: ignore[method-assign]


class Learn:
    """Remembers what each layer returns beside its hidden states, so that a stand-in can return the same form."""

    def __init__(self) -> None:
        self.forms: dict[int, tuple[bool, ...] | None] = {}

    def layer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """Run it and note the form: None for a tensor, else for each item whether it is shaped like the hidden
        states."""
        out = call(hidden, named)
        like = lambda x: isinstance(x, torch.Tensor) and x.shape == hidden.shape  # noqa: E731
        self.forms[index] = tuple(like(x) for x in out) if isinstance(out, (tuple, list)) else None
        return out

    def mixer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """Run it."""
        return call(hidden, named)


class Record:
    """Stands in for every layer and keeps what upstream would have handed to it."""

    def __init__(self, forms: dict[int, tuple[bool, ...] | None]) -> None:
        self.forms = forms
        self.named: dict[int, dict[str, Any]] = {}

    def layer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """Keep the arguments; pass the hidden states on in the layer's own form."""
        self.named[index] = named
        form = self.forms.get(index)
        return hidden if form is None else tuple(hidden if like else None for like in form)

    def mixer(self, index: int, call: Call, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
        """Never reached: layers are stood in for."""
        raise RuntimeError("a mixer ran although its layer is stood in for")
