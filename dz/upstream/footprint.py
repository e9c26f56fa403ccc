"""What upstream's cache costs, found by running the decoder on the meta device: shapes, no numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dz.upstream.build import Built
from dz.upstream.cache import bytes_in, make_facade
from dz.upstream.decoder import FAILURES, Decoder, mixers, replaced
from dz.upstream.rope import Snapshot

SHORT, LONG = 64, 128  # tokens of the two runs; the difference is what one more token costs


@dataclass(frozen=True, slots=True)
class Footprint:
    """Cache bytes that grow with each token, and bytes that a sequence holds whatever its length."""

    per_token: int
    per_sequence: int


def footprint(built: Built, decoder: Decoder) -> Footprint | str:
    """The footprint of one sequence, or why upstream's decoder does not run on meta."""
    try:
        with on_meta(built.model), tolerant(built.layers):
            return measure(built, decoder)
    except FAILURES as e:
        return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


def measure(built: Built, decoder: Decoder) -> Footprint:
    """The same on a loaded model, by short runs. Windows are counted in full where the layers only append keys and
    values: a pool of blocks keeps what upstream's sliding caches drop."""
    short, long = _bytes(decoder, SHORT), _bytes(decoder, LONG)
    per_token = max(-(-(long - short) // (LONG - SHORT)), _appended(built, decoder))
    return Footprint(per_token, max(0, short - SHORT * per_token))


class _Meter:
    """A KVStore that counts the bytes of a token and stores nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, int] = {}

    def exchange(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers[layer] = sum(t.shape[1] * t.shape[3] * t.element_size() for t in (k, v))
        return k, v


def _appended(built: Built, decoder: Decoder) -> int:
    meter = _Meter()
    try:
        _run(decoder, make_facade(meter, built.text_config), SHORT)
    except FAILURES:
        return 0  # this model keeps something else than appended keys and values; its own caches were measured
    return sum(meter.layers.values())


def _bytes(decoder: Decoder, n: int) -> int:
    cache = decoder.new_cache()
    _run(decoder, cache, n)
    return bytes_in(cache)


def _run(decoder: Decoder, cache: Any, n: int) -> None:
    device = next(decoder.module.parameters()).device
    ids = torch.zeros(1, n, dtype=torch.long, device=device)
    with torch.no_grad():
        decoder(cache=cache, positions=torch.arange(n, device=device)[None], ids=ids)


@contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """A model's buffers on meta, put back afterwards."""
    kept = Snapshot(model.modules(), values=False)  # some ropes also keep tensors as plain attributes
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to("meta") if buffer is not None else None
    try:
        yield
    finally:
        kept.restore()


@contextmanager
def tolerant(layers: list[Any]) -> Iterator[None]:
    """Modules that meta cannot run (data-dependent routing to experts) hand their input on: they keep its shape, and
    only mixers touch the cache."""
    with ExitStack() as stack:
        for layer in layers:
            inside = {id(m) for _, mixer in mixers(layer) for m in mixer.modules()}
            for module in layer.modules():
                if module is not layer and id(module) not in inside and not isinstance(module, nn.ModuleList):
                    stack.enter_context(replaced(module, _or_input(module.forward)))
        yield


def _or_input(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return upstream(x, *args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return x

    return forward
