"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dz.core.messages import Logprob, Output, Sampling, Stats
from dz.engine.config import Limits
from dz.engine.runner import Memo, Runner
from dz.engine.sampler import Chooser, NothingToChoose, logprob
from dz.engine.scheduler import Scheduler
from dz.engine.sequence import Batch, Sequence, Work
from dz.errors import Refused


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    steps: Counter[str] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    tokens: int = 0


class Engine:
    """Scheduler and runner together. `eos` are the tokens that end a text unless a request ignores them."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        *,
        eos: frozenset[int],
        vocab: int,
        kernel_calls: Mapping[str, int] | None = None,
    ) -> None:
        self.runner, self.limits, self.eos, self.vocab = runner, limits, eos, vocab
        self.scheduler = Scheduler(limits, on_preempt=runner.forget)
        self.sequences: dict[str, Sequence] = {}
        self.counters = Counters()
        self._calls = kernel_calls if kernel_calls is not None else {}
        self._answers: list[Output] = []

    @property
    def idle(self) -> bool:
        """Nothing to run and nothing to say."""
        return self.scheduler.idle and not self._answers

    def submit(self, id: str, tokens: list[int], sampling: Sampling, media: dict[str, Any]) -> None:
        """Queue a request; one that can never run is answered by an error Output at the next `step`."""
        refusal = self._refusal(id, tokens, sampling)
        if refusal is not None:
            self._answers.append(Output(id, [], finish="error", error=refusal))
            return
        room = self.scheduler.longest - len(tokens)
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos)
        seq = Sequence(
            id,
            list(tokens),
            len(tokens),
            sampling,
            min(sampling.max_tokens, room),
            whole=len(tokens) if media or self.runner.whole(len(tokens)) else 0,
            stepwise=self.runner.stepwise,
            memo=Memo(media),
        )
        seq.chooser = Chooser(sampling, tokens, stops, self.vocab)
        seq.prompt_logprobs = [None] if sampling.prompt_logprobs is not None else None
        self.sequences[id] = seq
        self.scheduler.add(seq)

    def _refusal(self, id: str, tokens: list[int], sampling: Sampling) -> tuple[str, str] | None:
        if id in self.sequences:
            return "bad_request", f"a request with the id {id} is already running"
        if not all(0 <= t < self.vocab for t in (*tokens, *sampling.allowed_token_ids)):
            return "bad_request", f"the request holds a token id outside 0..{self.vocab - 1}"
        return self.scheduler.refusal(len(tokens), sampling.max_tokens)

    def abort(self, ids: list[str]) -> None:
        """End requests wherever they are; unknown ids are ignored."""
        for id in ids:
            if id in self.sequences:
                self._end(self.sequences[id], "abort")

    def step(self) -> list[Output]:
        """Run one batch and return what there is to say: new tokens, endings, errors."""
        batch = self.scheduler.next()
        if batch is not None:
            batch = self._prepared(batch)
        if batch is not None:
            self.counters.steps[batch.kind] += 1
            self.counters.batch_sizes[len(batch.work)] += 1
            self.counters.tokens += batch.tokens
            wanted = [self._wanted(w) for w in batch.work]
            self._apply(batch, wanted, self.runner.execute(batch, wanted))
        out, self._answers = self._answers, []
        return out

    def stats(self) -> Stats:
        """Counters and levels for /metrics."""
        s = self.scheduler
        return Stats(
            running=len(s.running),
            waiting=len(s.waiting),
            blocks_used=s.admission.blocks.used,
            slots_used=s.admission.slots.used,
            steps=dict(self.counters.steps),
            batch_sizes=dict(self.counters.batch_sizes),
            step_tokens=self.counters.tokens,
            preemptions=s.preemptions,
            kernel_calls=dict(self._calls),
        )

    def _prepared(self, batch: Batch) -> Batch | None:
        kept = []
        for w in batch.work:
            try:
                if w.start == 0:
                    self.runner.prepare(w.seq)
                kept.append(w)
            except Refused as e:
                self._end(w.seq, "error", error=(e.code, f"{e.what}: {e.why}"))
        return Batch(tuple(kept)) if kept else None

    def _wanted(self, w: Work) -> list[int]:
        """Offsets within the work: those that give log-probabilities of the prompt, and the last one if it chooses."""
        out: list[int] = []
        if w.seq.prompt_logprobs is not None and w.start < w.seq.prompt:
            known = len(w.seq.prompt_logprobs)  # logits at p give the log-probability of token p + 1
            out = list(range(max(known - 1 - w.start, 0), min(w.count, w.seq.prompt - w.start)))
        if w.last and (not out or out[-1] != w.count - 1):
            out.append(w.count - 1)
        return out

    def _apply(self, batch: Batch, wanted: list[list[int]], logits: torch.Tensor) -> None:
        """One pass over all rows finds the greedy choice of each and whether it is finite (a maximum keeps NaN)."""
        best, choice = logits.max(-1) if len(logits) else (logits, logits)
        peaks, greedy = best.tolist(), choice.tolist()
        end = 0
        for w, offsets in zip(batch.work, wanted, strict=True):
            rows, end = logits[end : end + len(offsets)], end + len(offsets)
            seq = w.seq
            seq.computed = w.start + w.count
            if seq.prompt_logprobs is not None and w.start < seq.prompt and offsets:
                self._note_prompt(w, rows)
            if not w.last:
                continue
            if not math.isfinite(peaks[end - 1]):
                self._end(seq, "error", error=("non_finite", "the model produced a non-finite value for this request"))
            elif seq.output >= seq.max_tokens:
                self._end(seq, "length")
            else:
                self._extend(seq, rows[-1], greedy[end - 1] if seq.chooser.plain else None)

    def _extend(self, seq: Sequence, row: torch.Tensor, greedy: int | None) -> None:
        try:
            token = greedy if greedy is not None else seq.chooser.choose(row.cpu(), seq.output)
        except NothingToChoose:
            why = "penalties and biases leave no token with a finite score"
            self._end(seq, "error", error=("nothing_to_choose", why))
            return
        seq.chooser.note(token)
        logprobs: list[Logprob] | None = None
        if seq.sampling.logprobs is not None:
            logprobs = [logprob(torch.log_softmax(row, -1), token, seq.sampling.logprobs)]
        if token in seq.chooser.stops and seq.output >= seq.sampling.min_tokens:
            self._end(seq, "stop", stop_token=token)
            return
        seq.tokens.append(token)
        done, rope = seq.output >= seq.max_tokens, self.runner.following
        self._answers.append(
            Output(
                seq.id,
                [token],
                finish="length" if done else None,
                logprobs=logprobs,
                prompt_logprobs=self._prompt_logprobs(seq),
            )
        )
        if done:
            self._forget(seq)
        elif rope is not None and rope.restarts and len(seq.tokens) == rope.length + 1:
            self.scheduler.restart(seq)
            self.runner.forget(seq)

    def _note_prompt(self, w: Work, rows: torch.Tensor) -> None:
        seq = w.seq
        held = seq.prompt_logprobs
        if held is None:
            return
        first = max(len(held) - 1 - w.start, 0)
        for k, row in enumerate(torch.log_softmax(rows, -1)):
            p = w.start + first + k + 1
            if p < seq.prompt and p == len(held):
                held.append(logprob(row, seq.tokens[p], seq.sampling.prompt_logprobs or 0))

    def _prompt_logprobs(self, seq: Sequence) -> list[Logprob | None] | None:
        return seq.prompt_logprobs if seq.output == 1 else None

    def _end(
        self, seq: Sequence, finish: str, *, stop_token: int | None = None, error: tuple[str, str] | None = None
    ) -> None:
        prompt = seq.prompt_logprobs if seq.output == 0 and error is None else None
        self._answers.append(
            Output(seq.id, [], finish=finish, stop_token=stop_token, error=error, prompt_logprobs=prompt)
        )
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self.runner.forget(seq)
        self.sequences.pop(seq.id, None)
