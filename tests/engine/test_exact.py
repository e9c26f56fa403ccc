"""Token by token what upstream generates, whatever shares the batch, however prompts are cut and pools are sized."""

import inspect

import pytest
import torch

from dz.upstream.cache import CACHE_NAMES, make_past

NAMES = [
    "llama", "gpt_oss", "gemma2", "llama4_text", "qwen3_moe", "deepseek_v3", "deepseek_v32", "deepseek_v4",
    "qwen3_next", "minimax", "mamba2", "mamba", "lfm2", "gemma3n_text", "opt", "longrope", "dynamic",
    "qwen3_vl", "gemma3", "llava",
]  # fmt: skip


@pytest.fixture(params=NAMES)
def model(request, models):
    return models(request.param)


def jobs(model, helpers, tiny, rounds=2):
    return [
        (f"{r}.{i}", c.tokens, helpers.greedy(tiny.NEW), dict(c.media))
        for r in range(rounds)
        for i, c in enumerate(model.cases)
    ]


def check(model, got, ends):
    wrong = {id: (t, model.want[int(id[2:])]) for id, t in got.items() if t != model.want[int(id[2:])]}
    assert not wrong
    assert set(ends.values()) == {"length"}


def test_the_case_can_fail(model):
    """Greedy output varies within each answer and between answers, and no step is a near tie."""
    assert min(len(set(t)) for t in model.want) >= 5
    assert len({tuple(t) for t in model.want}) == len(model.want)
    assert model.margin > 1e-3


def test_all_at_once(model, helpers, tiny):
    engine = model.engine()
    got, ends, _ = helpers.drive(engine, jobs(model, helpers, tiny))
    check(model, got, ends)
    assert len(got) == 2 * len(model.cases)
    assert max(engine.counters.batch_sizes) == 8
    helpers.assert_idle(engine)


def test_small_chunks_and_blocks(model, helpers, tiny):
    engine = model.engine(chunk=5, block=4, blocks=256, seqs=5)
    got, ends, _ = helpers.drive(engine, jobs(model, helpers, tiny, rounds=1))
    check(model, got, ends)
    assert engine.counters.steps["mixed"] > 0
    helpers.assert_idle(engine)


def test_staggered(model, helpers, tiny):
    engine = model.engine(chunk=16, block=4, blocks=256)
    got, ends, _ = helpers.drive(engine, jobs(model, helpers, tiny, rounds=1), every=3)
    check(model, got, ends)
    assert engine.counters.steps["mixed"] > 0
    assert engine.counters.steps["decode"] > 0
    helpers.assert_idle(engine)


def test_preempted(model, helpers, tiny):
    """A pool that holds hardly more than the longest sequence."""
    longest = max(len(c.tokens) for c in model.cases) + tiny.NEW
    engine = model.engine(chunk=16, block=2, blocks=longest // 2 + 4, seqs=6)
    got, ends, _ = helpers.drive(engine, jobs(model, helpers, tiny))
    check(model, got, ends)
    assert engine.stats().preemptions > 2
    helpers.assert_idle(engine)


def test_one_by_one(model, helpers, tiny):
    for i in (1, len(model.cases) - 1):
        engine = model.engine()
        got, _, _ = helpers.drive(
            engine, [(f"0.{i}", model.cases[i].tokens, helpers.greedy(tiny.NEW), dict(model.cases[i].media))]
        )
        assert got[f"0.{i}"] == model.want[i]


def test_tier(model):
    tier = model.loaded.tier
    assert tier.name == model.tier
    assert 0 <= tier.error < 1e-4
    assert tier.whole == (model.name in ("mamba", "minimax"))
    assert [r.partition(":")[0] for r in tier.rejected] == ["prompts in chunks"] * tier.whole + ["gather"] * (
        model.tier == "isolate"
    )
    assert all(len(r) > 30 for r in tier.rejected)
    assert any(f"in tier {model.tier}" in line for line in model.said)


def test_longrope_as_upstream_generates(models, tiny):
    """Up to the length where the rope changes; and beyond it, where upstream feeds all tokens anew."""
    model = models("longrope")
    upstream = tiny.upstream(model.folder)
    prepare = upstream.prepare_inputs_for_generation
    name = next(n for n in CACHE_NAMES if n in inspect.signature(upstream.forward).parameters)
    fed = prepare(
        torch.zeros(1, 21, dtype=torch.long), next_sequence_length=1, **{name: make_past(upstream.config, 20)}
    )
    sound = fed["input_ids"].shape[1] == 21
    got = [a.tokens for a in tiny.generate(model.folder, model.cases)]
    for case, mine, theirs in zip(model.cases, model.want, got, strict=True):
        crosses = len(case.tokens) <= 20 < len(case.tokens) + tiny.NEW
        n = tiny.NEW if sound or not crosses else 20 - len(case.tokens) + 1
        assert mine[:n] == theirs[:n]
