"""Continuous batching: which tokens of which sequences run next. Pure Python, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dz.engine.cache.pool import Admission
from dz.engine.config import Limits
from dz.engine.sequence import Batch, Sequence, Work


class Scheduler:
    """Running sequences first, oldest first, then waiting ones as long as seats, tokens, blocks and slots last.

    A sequence that cannot grow preempts the youngest running one: its blocks and slot are freed and it waits again, in
    front, to be recomputed. `on_preempt` lets the runner drop what it keeps for that sequence."""

    def __init__(self, limits: Limits, on_preempt: Callable[[Sequence], None] | None = None) -> None:
        self.limits = limits
        self.admission = Admission(blocks=limits.blocks, block_size=limits.block_size, slots=limits.slots)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._on_preempt = on_preempt or (lambda seq: None)

    @property
    def longest(self) -> int:
        """The longest context in tokens: the model's limit, or what the whole pool holds."""
        return min(self.limits.max_model_len, self.limits.blocks * self.limits.block_size)

    def refusal(self, prompt: int, max_tokens: int) -> tuple[str, str] | None:
        """Why a request can never run, as (code, words); None when it can."""
        most = self.longest
        if prompt < 1:
            return "bad_request", "the prompt is empty"
        if prompt + min(max_tokens, 1) > most:
            text = f"the prompt has {prompt} tokens, the maximum context length is {most} tokens including the output"
            return "too_long", text
        return None

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that `refusal` let pass."""
        self.waiting.append(seq)

    def restart(self, seq: Sequence) -> None:
        """Compute all tokens of a running sequence anew, in one piece; it keeps its seat."""
        seq.computed, seq.whole = 0, len(seq.tokens)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if seq.state == "running":
            self.running.remove(seq)
        elif seq.state == "waiting":
            self.waiting.remove(seq)
        self.admission.release(seq.blocks, seq.slot)
        seq.slot, seq.state = None, "finished"

    @property
    def idle(self) -> bool:
        """Nothing is running or waiting."""
        return not (self.running or self.waiting)

    def next(self) -> Batch | None:
        """The next step, or None when nothing can run. The work counts as done: `computed` moves when it is applied."""
        budget = self.limits.max_num_batched_tokens
        before = self.preemptions
        work: list[Work] = []
        for seq in list(self.running):
            if seq.state != "running" or budget <= 0:
                continue
            count = self._share(seq, budget)
            if self._room(seq, count):
                work.append(Work(seq, seq.computed, count))
                budget -= count
        if self.preemptions > before:  # what was just freed is for those who run
            return Batch(tuple(work)) if work else None
        budget = self.limits.max_num_batched_tokens - sum(w.count for w in work)
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            seq = self.waiting[0]
            count = self._share(seq, budget)
            slot = self.admission.grow(seq.blocks, seq.slot, seq.computed + count)
            if slot is None:
                break
            self.waiting.popleft()
            seq.slot, seq.state = slot, "running"
            self.running.append(seq)
            work.append(Work(seq, seq.computed, count))
            budget -= count
        return Batch(tuple(work)) if work else None

    @staticmethod
    def _share(seq: Sequence, budget: int) -> int:
        """What must be whole takes what it needs in one piece, and may overdraw the budget: waiting for an empty step
        could take for ever. Everything else takes what is left."""
        if seq.computed < seq.whole:
            return seq.whole - seq.computed
        if seq.stepwise:
            return min(seq.prompt - seq.computed, budget) if seq.computed < seq.prompt else 1
        return min(seq.pending, budget)

    def _room(self, seq: Sequence, count: int) -> bool:
        while True:
            slot = self.admission.grow(seq.blocks, seq.slot, seq.computed + count)
            if slot is not None:
                seq.slot = slot
                return True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.admission.release(seq.blocks, seq.slot)
        seq.slot, seq.state, seq.computed = None, "waiting", 0
        seq.preempted += 1
        self.preemptions += 1
        self._on_preempt(seq)
        self.waiting.appendleft(seq)
