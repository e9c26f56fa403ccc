"""What upstream's multimodal wrapper hands to its decoder for a prompt: captured, never re-implemented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dz.errors import Refused
from dz.upstream.build import Built
from dz.upstream.cache import make_past
from dz.upstream.decoder import Decoder, cache_argument, replaced


class _Captured(Exception):
    """Carries the decoder's arguments out of upstream's forward."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`given` are the decoder's arguments for the whole prompt (embeddings, masks, image extras) without positions and
    cache. `positions` [R, 1, n], [1, n] or None (counted from 0). `shift` [R, 1, 1]: what decoding adds to the token's
    index in each row, None where that is 0."""

    given: dict[str, Any]
    positions: torch.Tensor | None
    shift: torch.Tensor | None


class Wrapper:
    """Upstream's whole model, called only up to its decoder."""

    def __init__(self, built: Built, decoder: Decoder) -> None:
        self.built, self.decoder = built, decoder
        self.cache_name = cache_argument(built.model) or str(decoder.cache_name)
        self.rows = self._rows()

    def prompt(self, ids: torch.Tensor, media: Mapping[str, Any]) -> Prompt:
        """The decoder's arguments for `ids` [1, n] with the processor's tensors. Raises Refused when they do not fit
        together (upstream's own words)."""
        n = ids.shape[1]
        try:
            given = self._call(ids, self.decoder.new_cache(), dict(media))
        except (ValueError, RuntimeError, IndexError, TypeError) as e:
            raise Refused(
                "the images do not fit the prompt",
                f"{type(e).__name__}: {e}",
                "send the prompt as the chat template renders it",
                code="bad_image",
            ) from e
        positions = given.pop("position_ids", None)
        shift = None
        if positions is not None and positions.dim() == 3:
            after = self._call(ids[:, -1:], make_past(self.built.text_config, n), {})["position_ids"]
            shift = after.reshape(after.shape[0], 1, -1)[..., -1:] - n
        return Prompt({k: v for k, v in given.items() if v is not None}, positions, shift)

    def _rows(self) -> int | None:
        """How many rows upstream's position ids have for text (None: a plain [B, S])."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(self.built.model.parameters()).device)
        try:
            positions = self._call(ids, self.decoder.new_cache(), {}).get("position_ids")
        except (ValueError, RuntimeError, IndexError, TypeError):
            return None
        return positions.shape[0] if positions is not None and positions.dim() == 3 else None

    def _call(self, ids: torch.Tensor, cache: Any, media: dict[str, Any]) -> dict[str, Any]:
        names = list(self.decoder.parameters)[1:]

        def capture(*args: Any, **kwargs: Any) -> None:
            raise _Captured({**dict(zip(names, args, strict=False)), **kwargs})

        length = ids.shape[1] + cache.get_seq_length()
        mask = torch.ones(1, length, dtype=torch.long, device=ids.device)
        with torch.no_grad(), replaced(self.decoder.module, capture):
            try:
                self.built.model(
                    input_ids=ids, attention_mask=mask, use_cache=True, **{self.cache_name: cache}, **media
                )
            except _Captured as e:
                got = dict(e.args[0])
        for name in (str(self.decoder.cache_name), "use_cache", "return_dict"):
            got.pop(name, None)
        return got
