"""The scheduler under random requests: budget and seats kept, no block shared, progress at every step."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dz.core.messages import Sampling
from dz.engine.config import Limits
from dz.engine.scheduler import Scheduler
from dz.engine.sequence import Batch, Sequence, Work


def limits(*, longest=64, seqs=4, chunk=8, block=4, blocks=16, slots=4):
    return Limits(
        max_model_len=longest,
        max_num_seqs=seqs,
        max_num_batched_tokens=chunk,
        block_size=block,
        blocks=blocks,
        slots=slots,
    )


def sequence(name, prompt, new, **traits):
    return Sequence(str(name), [7] * prompt, prompt, Sampling(max_tokens=new), new, **traits)


def apply(scheduler, batch, log=None):
    """What the engine does with a step, without a model: one token after each `last` work."""
    for w in batch.work:
        w.seq.computed = w.start + w.count
        if log is not None:
            log.setdefault(w.seq.id, []).append((w.start, w.count))
        if w.last:
            w.seq.tokens.append(9)
            if w.seq.output >= w.seq.max_tokens:
                scheduler.finish(w.seq)


class Serving(RuleBasedStateMachine):
    """Adds, aborts and steps in any order, with random limits."""

    @initialize(
        seqs=st.integers(1, 5),
        slots=st.integers(1, 5),
        chunk=st.integers(1, 12),
        block=st.integers(1, 5),
        blocks=st.integers(2, 20),
        longest=st.integers(2, 60),
    )
    def start(self, seqs, slots, chunk, block, blocks, longest):
        self.limits = limits(longest=longest, seqs=seqs, chunk=chunk, block=block, blocks=blocks, slots=slots)
        self.forgotten = []
        self.s = Scheduler(self.limits, on_preempt=self.forgotten.append)
        self.names = itertools.count()
        self.live: list[Sequence] = []

    @rule(prompt=st.integers(0, 70), new=st.integers(1, 9), whole=st.booleans(), stepwise=st.booleans())
    def add(self, prompt, new, whole, stepwise):
        refusal = self.s.refusal(prompt, new)
        room = self.s.longest - prompt
        assert (refusal is not None) == (prompt < 1 or room < 1)
        if refusal is None:
            seq = sequence(next(self.names), prompt, min(new, room), whole=prompt * whole, stepwise=stepwise)
            self.s.add(seq)
            self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        seq = data.draw(st.sampled_from(self.live))
        self.s.finish(seq)
        self.live.remove(seq)
        assert seq.blocks == []
        assert seq.slot is None

    @rule()
    def step(self):
        preempted, idle = self.s.preemptions, self.s.idle
        batch = self.s.next()
        if idle:
            assert batch is None
            return
        assert batch is not None, "there is work and nothing runs"
        assert len({w.seq.id for w in batch.work}) == len(batch.work) <= self.limits.max_num_seqs
        for w in batch.work:
            assert w.seq.state == "running"
            assert w.start == w.seq.computed
            assert 0 < w.count <= w.seq.pending
            assert len(w.seq.blocks) * self.limits.block_size >= w.start + w.count
            if w.seq.whole and w.start == 0:
                assert w.count == w.seq.prompt
            if w.seq.stepwise and w.start >= w.seq.prompt:
                assert w.count == 1
        over = [w for w in batch.work if w.seq.whole and w.start == 0]
        others = batch.tokens - sum(w.count for w in over)
        assert others <= self.limits.max_num_batched_tokens
        if batch.tokens > self.limits.max_num_batched_tokens:
            assert batch.tokens - over[-1].count < self.limits.max_num_batched_tokens, "overdrawn more than once"
        assert len(self.forgotten) == self.s.preemptions >= preempted
        for seq in self.forgotten[preempted:]:
            assert (seq.state, seq.computed, seq.blocks, seq.slot) == ("waiting", 0, [], None)
        apply(self.s, batch)
        self.live = [q for q in self.live if q.state != "finished"]

    @invariant()
    def nothing_shared(self):
        if not hasattr(self, "s"):
            return
        held = [b for q in self.live for b in q.blocks]
        slots = [q.slot for q in self.live if q.slot is not None]
        assert len(held) == len(set(held)) == self.s.admission.blocks.used
        assert len(slots) == len(set(slots)) == self.s.admission.slots.used == len(self.s.running)
        assert len(self.s.running) <= min(self.limits.max_num_seqs, self.limits.slots)
        assert {id(q) for q in self.live} == {id(q) for q in (*self.s.running, *self.s.waiting)}

    def teardown(self):
        """Whatever was queued finishes, in at most as many steps as there are tokens to compute."""
        if not hasattr(self, "s"):
            return
        self.live = list(self.live)
        most = sum((q.prompt + q.max_tokens) for q in self.live) * (len(self.live) + 1) + 1
        for _ in range(most):
            if self.s.idle:
                break
            self.step()
        assert self.s.idle
        assert (self.s.admission.blocks.used, self.s.admission.slots.used) == (0, 0)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def run(scheduler):
    """(work of each sequence, every batch's kind and phase, what ran)."""
    log, kinds = {}, []
    while not scheduler.idle:
        batch = scheduler.next()
        kinds.append((batch.kind, batch.phase, [(w.seq.id, w.start, w.count) for w in batch.work]))
        apply(scheduler, batch, log)
    return log, kinds


@pytest.mark.parametrize("chunk", [1, 7, 8, 9, 100])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 33])
def test_chunks_cover_a_prompt_once(chunk, prompt):
    s = Scheduler(limits(chunk=chunk, blocks=40))
    s.add(sequence("a", prompt, 3))
    log, kinds = run(s)
    flat = [p for start, count in log["a"] for p in range(start, start + count)]
    assert flat == list(range(prompt + 2))
    assert max(count for _, count in log["a"]) == min(chunk, prompt)
    assert [k for k, _, _ in kinds] == ["prefill"] * -(-prompt // chunk) + ["decode"] * 2


def test_a_last_chunk_of_one_token_is_prefill():
    """R50: one token of a prompt beside running decodes must not count as decode."""
    s = Scheduler(limits(chunk=8, blocks=40))
    s.add(sequence("old", 2, 9))
    first = s.next()
    apply(s, first)
    s.add(sequence("new", 15, 4))  # 7 beside the decode, 7, then 1
    seen = []
    for _ in range(4):
        batch = s.next()
        seen.append((batch.kind, batch.phase, [w.count for w in batch.work]))
        apply(s, batch)
    assert seen == [
        ("mixed", "prefill", [1, 7]),
        ("mixed", "prefill", [1, 7]),
        ("mixed", "prefill", [1, 1]),
        ("decode", "decode", [1, 1]),
    ]


def test_kinds_of_a_batch():
    fresh, old = sequence("p", 1, 4), sequence("d", 3, 4)
    old.computed = 3
    old.tokens.append(9)
    assert Batch((Work(fresh, 0, 1),)).kind == "prefill"
    assert Batch((Work(old, 3, 1),)).kind == "decode"
    both = Batch((Work(old, 3, 1), Work(fresh, 0, 1)))
    assert (both.kind, both.phase, both.tokens) == ("mixed", "prefill", 2)


def test_preemption_takes_the_youngest_and_runs_it_again():
    s = Scheduler(limits(chunk=16, block=1, blocks=12, longest=12, seqs=3, slots=3))
    for name in "abc":
        s.add(sequence(name, 3, 6))
    log, _ = run(s)
    assert s.preemptions > 0
    assert len(log["a"]) == 6  # 3 tokens at once, then one at a time: never set back
    restarts = {name: sum(start == 0 for start, _ in log[name]) for name in "abc"}
    assert restarts["a"] == 1
    assert restarts["b"] + restarts["c"] == 2 + s.preemptions


def test_whole_prompts_are_never_cut_and_outputs_follow_one_by_one():
    s = Scheduler(limits(chunk=4, block=1, blocks=16, longest=16, seqs=2, slots=2))
    s.add(sequence("a", 5, 8))
    s.add(sequence("w", 6, 6, whole=6, stepwise=True))
    log, _ = run(s)
    assert s.preemptions > 0
    assert {count for start, count in log["w"] if start == 0} == {6}
    assert {count for start, count in log["w"] if start >= 6} == {1}


def test_waiting_sequences_go_in_their_order():
    s = Scheduler(limits(chunk=100, seqs=2, slots=2))
    for name in "abcd":
        s.add(sequence(name, 4, 2))
    _, kinds = run(s)
    assert [[id for id, start, _ in work if start == 0] for _, _, work in kinds] == [["a", "b"], [], ["c", "d"], []]


def test_what_can_never_run_is_refused():
    s = Scheduler(limits(longest=64, block=4, blocks=5))
    assert s.longest == 20  # the pool is the limit, not the model
    assert s.refusal(0, 4) == ("bad_request", "the prompt is empty")
    code, text = s.refusal(20, 4)
    assert code == "too_long"
    assert "20" in text
    assert s.refusal(19, 4) is None
    assert s.refusal(20, 0) is None
