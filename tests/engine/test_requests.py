"""Requests on their way: abort, refusal, stops, log-probabilities, seeds, values that are not finite, nothing left."""

import gc
import weakref

import msgspec
import pytest
import torch

from dz.core.messages import Sampling


@pytest.fixture(scope="module")
def llama(models):
    return models("llama")


def prompt_of(n, seed=3):
    return torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_abort_anywhere(llama, helpers):
    """Waiting, prefilling and decoding requests end at once; the others are not disturbed."""
    engine = llama.engine(chunk=8, block=4, seqs=2)
    for i, c in enumerate(llama.cases):
        engine.submit(str(i), c.tokens, helpers.greedy(12), {})
    engine.submit("late", llama.cases[1].tokens, helpers.greedy(12), {})
    outs = [o for _ in range(3) for o in engine.step()]  # "0" decodes, "1" has run, the rest waits
    assert "late" not in {o.id for o in outs}
    held = engine.scheduler.admission.blocks.used
    engine.abort(["0", "3", "unknown"])
    assert engine.scheduler.admission.blocks.used < held
    got, ends, said = helpers.drive(engine, [])
    assert {o.id: o.finish for o in said if o.finish == "abort"} == {"0": "abort", "3": "abort"}
    for i in ("1", "2"):
        assert [t for o in outs for t in o.tokens if o.id == i] + got[i] == llama.want[int(i)]
    assert got["late"] == llama.want[1]
    assert ends["2"] == "length"
    engine.abort(["1"])
    helpers.assert_idle(engine)


@pytest.mark.parametrize(
    "tokens, sampling, code, word",
    [
        ([], Sampling(max_tokens=4), "bad_request", "empty"),
        ([5] * 32, Sampling(max_tokens=4), "too_long", "32 tokens"),
        ([5, 97], Sampling(max_tokens=4), "bad_request", "0..96"),
        ([5, -1], Sampling(max_tokens=4), "bad_request", "0..96"),
        ([5], Sampling(max_tokens=4, allowed_token_ids=(3, 97)), "bad_request", "0..96"),
    ],
)
def test_impossible_requests_are_refused_at_once(llama, helpers, tokens, sampling, code, word):
    engine = llama.engine(block=4, blocks=8)  # 32 tokens, although the model could take 256
    engine.submit("a", tokens, sampling, {})
    engine.submit("b", llama.cases[1].tokens, helpers.greedy(5), {})
    got, ends, said = helpers.drive(engine, [])
    (error,) = [o.error for o in said if o.id == "a"]
    assert error[0] == code
    assert word in error[1]
    assert (ends["a"], got["b"]) == ("error", llama.want[1][:5])


def test_an_id_that_is_taken(llama, helpers):
    engine = llama.engine()
    engine.submit("a", llama.cases[0].tokens, helpers.greedy(3), {})
    engine.submit("a", llama.cases[1].tokens, helpers.greedy(3), {})
    said = [o for _ in range(3) for o in engine.step()]
    assert [o.error[0] for o in said if o.error] == ["bad_request"]
    assert [t for o in said for t in o.tokens] == llama.want[0][:3]
    helpers.assert_idle(engine)


def test_the_context_ends_a_request(llama, helpers):
    """Prompt and output together fill the pool to the last token, and no more."""
    engine = llama.engine(block=4, blocks=5)
    tokens = llama.cases[2].tokens  # 17, so 3 more fit
    got, ends, _ = helpers.drive(engine, [("a", tokens, helpers.greedy(50), {})])
    assert (got["a"], ends["a"]) == (llama.want[2][:3], "length")
    helpers.assert_idle(engine)


def test_stop_tokens(llama, helpers):
    want = llama.want[1]
    stop = want[4]
    assert stop not in want[:4]
    end = next(t for t in want if t not in want[:5])

    def run(eos=frozenset(), **more):
        engine = llama.engine(eos=eos)
        got, ends, said = helpers.drive(engine, [("a", llama.cases[1].tokens, helpers.greedy(12, **more), {})])
        helpers.assert_idle(engine)
        return got["a"], ends["a"], said[-1].stop_token

    assert run(stop_token_ids=(stop,)) == (want[:4], "stop", stop)
    assert run(eos=frozenset({stop, end})) == (want[:4], "stop", stop)
    assert run(eos=frozenset({stop}), ignore_eos=True) == (want, "length", None)
    assert run(eos=frozenset({end}), ignore_eos=True, stop_token_ids=(stop,)) == (want[:4], "stop", stop)


def test_min_tokens_keeps_stops_out(llama, helpers):
    stop = llama.want[1][4]
    engine = llama.engine(eos=frozenset({stop}))
    got, ends, _ = helpers.drive(engine, [("a", llama.cases[1].tokens, helpers.greedy(12, min_tokens=8), {})])
    assert got["a"][:4] == llama.want[1][:4]
    assert stop not in got["a"][:8]
    assert len(got["a"]) >= 8
    assert ends["a"] in ("stop", "length")


def upstream_logprobs(tiny, model, tokens):
    with torch.no_grad():
        logits = tiny.upstream(model.folder)(input_ids=torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next"])
def test_logprobs_are_upstreams(models, helpers, tiny, name):
    """Of the prompt and of the output; the greedy token's own is exactly the first of `top`."""
    model = models(name)
    case, want = model.cases[2], model.want[2]
    engine = model.engine()
    sampling = helpers.greedy(12, logprobs=3, prompt_logprobs=2)
    _, _, said = helpers.drive(engine, [("a", case.tokens, sampling, {})])
    table = upstream_logprobs(tiny, model, case.tokens + want)
    first, *rest = said[0].prompt_logprobs
    assert first is None
    assert all(o.prompt_logprobs is None for o in said[1:])
    assert [p.token for p in rest] == case.tokens[1:]
    for at, p in enumerate(rest):
        check_logprob(table[at], p, 2)
    made = [p for o in said for p in o.logprobs]
    assert [p.token for p in made] == want
    for at, p in enumerate(made):
        check_logprob(table[len(case.tokens) - 1 + at], p, 3)
        assert (p.token, p.logprob) == p.top[0]
        assert p.rank == 1


def check_logprob(row, p, top):
    assert p.logprob == pytest.approx(float(row[p.token]), abs=1e-4)
    assert p.rank == int((row > row[p.token] + 1e-5).sum()) + 1
    best = row.topk(top)
    assert [t for t, _ in p.top] == best.indices.tolist()
    assert [v for _, v in p.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_prompt_logprobs_across_chunks(models, helpers, name, chunk):
    model = models(name)
    job = [("a", model.cases[3].tokens, helpers.greedy(3, prompt_logprobs=1), {})]
    other = [("b", model.cases[2].tokens, helpers.greedy(12, prompt_logprobs=0), {})]
    _, _, whole = helpers.drive(model.engine(), job)
    _, _, cut = helpers.drive(model.engine(chunk=chunk), other + job)
    want = whole[0].prompt_logprobs
    (got,) = [o.prompt_logprobs for o in cut if o.id == "a" and o.prompt_logprobs]
    assert len(got) == len(model.cases[3].tokens)
    assert [p and (p.token, p.rank) for p in got] == [p and (p.token, p.rank) for p in want]
    assert [p.logprob for p in got[1:]] == pytest.approx([p.logprob for p in want[1:]], abs=2e-5)
    assert [o.tokens for o in cut if o.id == "a"] == [o.tokens for o in whole]


def test_prompt_logprobs_survive_preemption(llama, helpers):
    """A request that is computed again after some output must still choose from its newest token."""
    jobs = [(str(i), c.tokens, helpers.greedy(12, prompt_logprobs=0), {}) for i, c in enumerate(llama.cases)] * 2
    jobs = [(f"{k}.{id}", *rest) for k, (id, *rest) in enumerate(jobs)]
    engine = llama.engine(chunk=64, block=2, blocks=26)
    got, _, said = helpers.drive(engine, jobs)
    assert engine.stats().preemptions > 2
    for id, tokens in got.items():
        assert tokens == llama.want[int(id[-1])], id
    for id in got:
        (held,) = [o.prompt_logprobs for o in said if o.id == id and o.prompt_logprobs]
        assert [p and p.token for p in held] == [None, *llama.cases[int(id[-1])].tokens[1:]]


def test_scoring_alone(llama, helpers):
    """max_tokens 0: the prompt's log-probabilities and no token."""
    engine = llama.engine(chunk=5)
    got, ends, said = helpers.drive(engine, [("a", llama.cases[2].tokens, helpers.greedy(0, prompt_logprobs=1), {})])
    assert (got["a"], ends["a"]) == ([], "length")
    assert len(said[-1].prompt_logprobs) == 17
    helpers.assert_idle(engine)


def test_a_seed_repeats_whatever_shares_the_batch(llama, helpers):
    drawn = Sampling(max_tokens=12, temperature=1.3, top_p=0.95, seed=41)
    alone, _, _ = helpers.drive(llama.engine(), [("a", llama.cases[1].tokens, drawn, {})])
    noise = [(str(i), c.tokens, Sampling(max_tokens=9, temperature=1.0), {}) for i, c in enumerate(llama.cases)]
    job = [("a", llama.cases[1].tokens, drawn, {})]
    crowd, _, _ = helpers.drive(llama.engine(chunk=7, block=2, blocks=26), noise[:2] + job + noise[2:], every=2)
    assert crowd["a"] == alone["a"]
    changed = msgspec.structs.replace(drawn, seed=42)
    again, _, _ = helpers.drive(llama.engine(), [("a", llama.cases[1].tokens, changed, {})])
    assert again["a"] != alone["a"]


def test_requests_without_a_seed_differ(llama, helpers):
    drawn = Sampling(max_tokens=12, temperature=1.5)
    got, _, _ = helpers.drive(llama.engine(), [(str(i), llama.cases[1].tokens, drawn, {}) for i in range(4)])
    assert len({tuple(t) for t in got.values()}) == 4


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
def test_values_that_are_not_finite_stay_with_their_request(models, helpers, name):
    """One token's embedding is NaN: requests that hold it end with an error, those beside them do not notice."""
    model = models(name)
    poison = 95
    table = model.loaded.built.decoder.get_input_embeddings().weight
    kept = table[poison].clone()
    table[poison] = float("nan")
    try:
        jobs = [(str(i), c.tokens, helpers.greedy(12), {}) for i, c in enumerate(model.cases)]
        bad = [
            ("x", [5, 6, poison, 7, 8, 9, 10, 11, 12], helpers.greedy(12), {}),
            ("y", [poison], helpers.greedy(3), {}),
        ]
        for chunk in (64, 7):
            engine = model.engine(chunk=chunk, block=4)
            got, _, said = helpers.drive(engine, [*jobs[:2], *bad, *jobs[2:]])
            assert {o.id: o.error[0] for o in said if o.error} == {"x": "non_finite", "y": "non_finite"}
            assert {i: got[str(i)] for i in range(4)} == dict(enumerate(model.want))
            helpers.assert_idle(engine)
            again, _, _ = helpers.drive(engine, jobs)  # in the blocks that the bad ones have left
            assert {i: again[str(i)] for i in range(4)} == dict(enumerate(model.want))
    finally:
        table[poison] = kept


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(llama, helpers, value, monkeypatch):
    """Found in the logits alone: only the row's request fails."""
    head = llama.loaded.runner.head

    class Bent:
        def __call__(self, hidden):
            out = head(hidden)
            if len(out) == 4:
                out[2, 17] = value
            return out

    monkeypatch.setattr(llama.loaded.runner, "head", Bent())
    jobs = [(str(i), c.tokens, helpers.greedy(12), {}) for i, c in enumerate(llama.cases)]
    engine = llama.engine()
    got, _, said = helpers.drive(engine, jobs)
    assert {o.id: o.error[0] for o in said if o.error} == {"2": "non_finite"}
    assert {i: got[str(i)] for i in (0, 1, 3)} == {i: llama.want[i] for i in (0, 1, 3)}
    helpers.assert_idle(engine)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "qwen3_vl"])
def test_sixty_mixed_requests_leave_nothing(models, helpers, name):
    model = models(name)
    engine = model.engine(chunk=24, block=4, blocks=28, seqs=6)
    watched = []
    jobs = []
    for k in range(60):
        case = model.cases[k % len(model.cases)]
        sampling = Sampling(max_tokens=1 + k % 7, temperature=(k % 3) / 2, seed=k, logprobs=1 if k % 5 == 0 else None)
        jobs.append((str(k), case.tokens, sampling, dict(case.media)))
    left, aborted, steps = list(jobs), 0, 0
    while left or not engine.idle:
        if left:
            engine.submit(*left.pop(0))
            watched.append(weakref.ref(engine.sequences[jobs[60 - len(left) - 1][0]].chooser))
        if steps % 9 == 5 and engine.sequences:
            engine.abort([next(iter(engine.sequences))])
            aborted += 1
        engine.step()
        steps += 1
        assert steps < 2000
    helpers.assert_idle(engine)
    assert aborted > 3
    gc.collect()
    assert not [w for w in watched if w() is not None], "finished requests are still referenced"


def test_counters(llama, helpers):
    engine = llama.engine(chunk=5)
    helpers.drive(engine, [(str(i), c.tokens, helpers.greedy(4), {}) for i, c in enumerate(llama.cases)])
    stats = engine.stats()
    assert sum(stats.steps.values()) == sum(stats.batch_sizes.values())
    assert stats.step_tokens == sum(len(c.tokens) for c in llama.cases) + 4 * 3
    assert set(stats.steps) == {"prefill", "mixed", "decode"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_that_leave_no_choice_end_that_request_alone(llama, helpers, temperature):
    engine = llama.engine()
    engine.submit("a", [5, 6], Sampling(max_tokens=4, temperature=temperature, repetition_penalty=1e-300), {})
    engine.submit("b", llama.cases[1].tokens, helpers.greedy(12), {})
    got, ends, said = helpers.drive(engine, [])
    (error,) = [o.error for o in said if o.id == "a" and o.error]
    assert error[0] == "nothing_to_choose" and ends["a"] == "error"
    assert got["b"] == llama.want[1]
    helpers.assert_idle(engine)
