"""The choice of tokens: frequencies, sets, formulas; log-probabilities."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dz.core.messages import Sampling
from dz.engine.sampler import Chooser, NothingToChoose, logprob

VOCAB = 23


def chooser(prompt=(), stops=(), vocab=VOCAB, **sampling):
    return Chooser(Sampling(max_tokens=9, **sampling), list(prompt), frozenset(stops), vocab)


def logits(seed=0, scale=2.0, vocab=VOCAB):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def warped(x, **s):
    """Upstream's own warpers in upstream's order: the probabilities."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    chain = [TemperatureLogitsWarper(s["temperature"])]
    chain += [TopKLogitsWarper(s["top_k"])] if s["top_k"] else []
    chain += [TopPLogitsWarper(s["top_p"])] if s["top_p"] < 1 else []
    chain += [MinPLogitsWarper(s["min_p"])] if s["min_p"] else []
    row = x[None].double()
    for step in chain:
        row = step(None, row)
    return torch.softmax(row[0], -1)


def test_greedy_takes_the_first_of_the_best():
    x = logits()
    x[7] = x[19] = x.max() + 1
    assert chooser(temperature=0.0).choose(x, 0) == 7
    assert chooser(temperature=0.0).plain
    assert not chooser(temperature=0.5).plain
    for changed in ({"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}):
        assert not chooser(temperature=0.0, **changed).plain
    for changed in ({"logit_bias": {1: 2.0}}, {"allowed_token_ids": (3,)}, {"min_tokens": 2}):
        assert not chooser(temperature=0.0, **changed).plain


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 5, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_candidates_are_upstreams(seed, temperature, top_k, top_p, min_p):
    """The same set with the same probabilities as upstream's warpers one after another."""
    s = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    x = logits(seed)
    want = warped(x, **s)
    tokens, probs = chooser(**s).candidates(x, 0)
    assert set(tokens.tolist()) == set(want.nonzero()[:, 0].tolist())
    assert torch.allclose(probs, want[tokens], atol=1e-9)
    assert probs.tolist() == sorted(probs.tolist(), reverse=True)
    drawn = chooser(seed=seed, **s)
    assert {drawn.choose(x, 0) for _ in range(20)} <= set(tokens.tolist())


@pytest.mark.parametrize(
    "s",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 9},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_frequencies(s):
    """Chi-square of 4000 draws against upstream's distribution."""
    n, x = 4000, logits(5, 1.5)
    want = warped(x, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **s})
    draw = chooser(seed=11, **s)
    seen = Counter(draw.choose(x, 0) for _ in range(n))
    assert not [t for t in seen if want[t] == 0]
    common = [t for t in range(VOCAB) if want[t] * n >= 5]
    rare = [t for t in range(VOCAB) if 0 < want[t] * n < 5]
    cells = [(seen[t], float(want[t]) * n) for t in common]
    if rare:
        cells.append((sum(seen[t] for t in rare), float(want[rare].sum()) * n))
    chi = sum((got - e) ** 2 / e for got, e in cells)
    df = len(cells) - 1
    assert df >= 3
    assert chi < df + 3.5 * math.sqrt(2 * df), (chi, df)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    x = logits(3, 50.0)
    assert {chooser(temperature=temperature, seed=i).choose(x, 0) for i in range(5)} == {int(x.argmax())}


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_at_least_one_token_is_left(top_p):
    x = torch.zeros(VOCAB)
    assert len(chooser(temperature=1.0, top_p=top_p).candidates(x, 0)[0]) == 1


def test_impossible_tokens_are_never_drawn():
    x = torch.full((VOCAB,), float("-inf"))
    x[[4, 9]] = torch.tensor([1.0, 1.0])
    draw = chooser(temperature=1.0, seed=1)
    assert {draw.choose(x, 0) for _ in range(60)} == {4, 9}


@given(
    seed=st.integers(0, 999),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    made=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    presence=st.sampled_from([0.0, 0.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.25, -0.5]),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
)
@settings(max_examples=120, deadline=None)
def test_penalties_by_formula(seed, prompt, made, presence, frequency, repetition):
    """Repetition as upstream's processor (prompt and output), presence and frequency as OpenAI documents (output)."""
    from transformers import RepetitionPenaltyLogitsProcessor

    x = logits(seed)
    c = chooser(
        prompt, temperature=1.0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    for t in made:
        c.note(t)
    want = x.clone()
    if repetition != 1 and prompt + made:
        want = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + made]), want[None].clone())[0]
    for t, n in Counter(made).items():
        want[t] -= presence + frequency * n
    tokens, probs = c.candidates(x, len(made))
    got = torch.zeros(VOCAB, dtype=torch.float64)
    got[tokens] = probs
    assert torch.allclose(got, torch.softmax(want.double(), -1), atol=1e-6)
    assert torch.equal(x, logits(seed)), "the logits were changed in place"


def test_bias_and_allowed_tokens():
    x = logits(2)
    assert chooser(temperature=0.0, logit_bias={6: 100.0}).choose(x, 0) == 6
    best = int(x.argmax())
    assert chooser(temperature=0.0, logit_bias={best: -100.0}).choose(x, 0) == int(x.topk(2).indices[1])
    allowed = (3, 8, 21)
    assert chooser(temperature=0.0, allowed_token_ids=allowed).choose(x, 0) == max(allowed, key=lambda t: float(x[t]))
    draw = chooser(temperature=5.0, allowed_token_ids=allowed, logit_bias={5: 100.0}, seed=3)
    assert {draw.choose(x, 0) for _ in range(80)} == set(allowed)


def test_min_tokens():
    x = logits(2)
    best, second = x.topk(2).indices.tolist()
    c = chooser(stops=(best,), temperature=0.0, min_tokens=2)
    assert [c.choose(x, made) for made in range(4)] == [second, second, best, best]
    draw = chooser(stops=(best,), temperature=1.0, min_tokens=2, seed=4)
    assert best not in {draw.choose(x, 1) for _ in range(80)}
    only = chooser(stops=(5, 6), temperature=20.0, min_tokens=2, allowed_token_ids=(5, 6), seed=5)
    assert {only.choose(x, 0) for _ in range(40)} == {5, 6}


def test_seeds():
    x = logits(1)
    draw = lambda **k: [c.choose(x, 0) for c in [chooser(temperature=1.0, **k)] for _ in range(30)]  # noqa: E731
    assert draw(seed=7) == draw(seed=7) != draw(seed=8)
    assert draw(seed=-1) == draw(seed=-1)
    assert draw(seed=2**63 + 5) == draw(seed=2**63 + 5)
    assert draw() != draw()


@given(seed=st.integers(0, 999), top=st.integers(0, VOCAB + 5), token=st.integers(0, VOCAB - 1))
@settings(max_examples=60, deadline=None)
def test_logprob(seed, top, token):
    row = torch.log_softmax(logits(seed), -1)
    p = logprob(row, token, top)
    assert (p.token, p.logprob) == (token, float(row[token]))
    assert len(p.top) == min(top, VOCAB)
    assert [v for _, v in p.top] == sorted(row.tolist(), reverse=True)[:top]
    assert all(float(row[t]) == v for t, v in p.top)
    assert p.rank == 1 + sum(v > p.logprob for v in row.tolist())
    assume(top > 0)
    best = logprob(row, int(row.argmax()), top)
    assert best.top[0] == (best.token, best.logprob)
    assert best.rank == 1


def test_ties_rank_alike():
    row = torch.log_softmax(torch.tensor([1.0, 3.0, 3.0, 0.0]), -1)
    assert [logprob(row, t, 0).rank for t in range(4)] == [3, 1, 1, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "s", [{"repetition_penalty": 1e-300}, {"logit_bias": {0: float("inf")}}, {"logit_bias": {1: float("nan")}}]
)
def test_scores_beyond_all_bounds_are_no_choice(temperature, s):
    with pytest.raises(NothingToChoose):
        chooser(prompt=range(VOCAB), temperature=temperature, **s).choose(logits(), 0)
