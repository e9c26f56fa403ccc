"""From logits to tokens: penalties, temperature, filters, choice, log-probabilities."""

from __future__ import annotations

import torch

from dz.core.messages import Logprob, Sampling


class NothingToChoose(Exception):
    """Penalties and biases of the request left no finite best score."""


class Chooser:
    """The choice of one request: its parameters and its own random numbers, independent of whatever shares the
    batch."""

    def __init__(self, sampling: Sampling, prompt: list[int], stops: frozenset[int], vocab: int) -> None:
        self.sampling, self.stops = sampling, stops
        self.prompt = torch.tensor(sorted({t for t in prompt if 0 <= t < vocab}), dtype=torch.long)
        self.counts: dict[int, int] = {}
        self.generator = torch.Generator()
        if sampling.seed is not None:
            self.generator.manual_seed(sampling.seed & ((1 << 63) - 1))
        else:
            self.generator.seed()

    @property
    def plain(self) -> bool:
        """Greedy over the raw logits: the whole batch can be decided at once."""
        s = self.sampling
        return s.temperature == 0 and not (self._penalised or s.logit_bias or s.allowed_token_ids or s.min_tokens)

    @property
    def _penalised(self) -> bool:
        s = self.sampling
        return s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1

    def choose(self, logits: torch.Tensor, made: int) -> int:
        """The next token from raw float32 logits [V] on the host; `made` tokens were generated before it. Raises
        NothingToChoose."""
        if self.sampling.temperature == 0:
            return int(_finite(self._adjust(logits.clone(), made)).argmax())
        tokens, probs = self.candidates(logits, made)
        total = probs.cumsum(-1)
        point = torch.rand(1, generator=self.generator, dtype=torch.float64) * total[-1]
        index = int(torch.searchsorted(total, point, right=True).clamp(max=len(tokens) - 1))
        return int(tokens[index])

    def candidates(self, logits: torch.Tensor, made: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that may come, most likely first, and their float64 probabilities. Filters follow each other as
        upstream's do (temperature, top-k, top-p, min-p), each on what the one before it left."""
        s = self.sampling
        x = _finite(self._adjust(logits.clone(), made)).double()
        order = torch.sort((x - x.max()) / s.temperature, descending=True, stable=True)
        probs = torch.softmax(order.values, -1)
        n = int((probs > 0).sum())
        if s.top_k > 0:
            n = min(n, s.top_k)
        probs = probs[:n] / probs[:n].sum()
        if s.top_p < 1:
            n = max(1, int(((probs.cumsum(-1) - probs) < s.top_p).sum()))
        if s.min_p > 0:
            n = max(1, min(n, int((probs >= s.min_p * probs[0]).sum())))
        return order.indices[:n], probs[:n] / probs[:n].sum()

    def note(self, token: int) -> None:
        """Remember a generated token for the penalties."""
        self.counts[token] = self.counts.get(token, 0) + 1

    def _adjust(self, x: torch.Tensor, made: int) -> torch.Tensor:
        s = self.sampling
        if s.repetition_penalty != 1:
            seen = torch.unique(torch.cat([self.prompt, torch.tensor(list(self.counts), dtype=torch.long)]))
            x[seen] = torch.where(x[seen] > 0, x[seen] / s.repetition_penalty, x[seen] * s.repetition_penalty)
        if self.counts and (s.presence_penalty or s.frequency_penalty):
            ids = torch.tensor(list(self.counts), dtype=torch.long)
            n = torch.tensor(list(self.counts.values()), dtype=x.dtype)
            x[ids] -= s.presence_penalty + s.frequency_penalty * n
        for token, bias in s.logit_bias.items():
            if 0 <= token < x.shape[0]:
                x[token] += bias
        if s.allowed_token_ids:
            mask = torch.full_like(x, float("-inf"))
            ids = torch.tensor([t for t in s.allowed_token_ids if 0 <= t < x.shape[0]], dtype=torch.long)
            mask[ids] = 0
            x = x + mask
        if made < s.min_tokens:
            stops = torch.tensor([t for t in self.stops if 0 <= t < x.shape[0]], dtype=torch.long)
            without = x.index_fill(0, stops, float("-inf"))
            if without.max() > float("-inf"):  # where stops alone are allowed, one of them it is; the text goes on
                x = without
        return x


def _finite(x: torch.Tensor) -> torch.Tensor:
    """`x` whose largest value (NaN counts as the largest) is finite. Raises NothingToChoose."""
    if not torch.isfinite(x.max()):
        raise NothingToChoose
    return x


def logprob(row: torch.Tensor, token: int, top: int) -> Logprob:
    """The Logprob of `token` from log-probabilities [V]; its `top` holds the `top` best, best first."""
    value = float(row[token])
    best = torch.topk(row, min(top, row.shape[0])) if top else None
    pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best is not None else []
    return Logprob(token, value, int((row > row[token]).sum()) + 1, pairs)
