"""A tier is taken because it was proved: every wrong one is found out, and the next one serves exactly."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.engine.cache import paged
from dz.engine.mixers import gather, isolate, masks, oracle, tiers
from dz.engine.mixers.gather import Gather, Share
from dz.engine.mixers.masks import MaskRule
from dz.errors import Refused


def choose(model, *, allow=True):
    """The tier of a loaded model, chosen again."""
    run = model.loaded.runner
    with torch.inference_mode():
        return tiers.choose(
            run.decoder,
            run.taps,
            gather=allow,
            rows=run.wrapper.rows,
            vocab=model.loaded.vocab,
            blocks=64,
            block_size=4,
        )


def serve(model, helpers, tiny, tier):
    """Every case of a model by an engine in this tier, in small chunks; True when all are upstream's tokens."""
    run = model.loaded.runner
    runner = type(run)(run.built, run.decoder, run.taps, run.head, run.wrapper, tier, run.phase)
    engine = model.engine(runner=runner, chunk=9, block=4)
    jobs = [(str(i), c.tokens, helpers.greedy(tiny.NEW), dict(c.media)) for i, c in enumerate(model.cases)]
    got, _, _ = helpers.drive(engine, jobs, every=2)
    assert engine.counters.steps["mixed"] > 0
    helpers.assert_idle(engine)
    return [got[str(i)] for i in range(len(jobs))] == model.want


# --- what is wrong is found


def leak(allowed, make):
    """Each query sees one key too many."""
    out = allowed.clone()
    out[..., 1:] |= allowed[..., :-1]
    return out


def miss(allowed, make):
    """Each query misses the first of its keys, where it has others."""
    first = (allowed.cumsum(-1) == 1) & allowed
    return allowed & ~(first & (allowed.sum(-1, keepdim=True) > 1))


def everything(allowed, make):
    return torch.ones_like(allowed)


@pytest.mark.parametrize("wrong", [leak, miss, everything])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_wrong_mask_is_found(models, helpers, tiny, monkeypatch, name, wrong):
    model = models(name)
    right = gather.as_mask
    monkeypatch.setattr(gather, "as_mask", lambda allowed, **k: right(wrong(allowed, None), **k))
    tier = choose(model)
    assert tier.name == "isolate"
    assert "gather: differs by" in tier.rejected[0]
    assert serve(model, helpers, tiny, tier)


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_a_wrong_rule_is_found(models, helpers, tiny, monkeypatch, name):
    """Windows and chunks that are taken for plain causal attention."""
    model = models(name)
    right = tiers.read_masks

    def read(*args):
        found = right(*args)
        return masks.Masks(dict.fromkeys(found.rules, MaskRule("full")), found.additive)

    monkeypatch.setattr(tiers, "read_masks", read)
    tier = choose(model)
    assert tier.name == "isolate"
    assert "gather: differs by" in tier.rejected[0]
    assert serve(model, helpers, tiny, tier)


def one_slot_off(right):
    def slots(self, blocks, start, end):
        return [s ^ (p == 3) for p, s in zip(range(start, end), right(self, blocks, start, end), strict=True)]

    return slots


def colliding(right):
    return lambda self, blocks, start, end: [s % 23 for s in right(self, blocks, start, end)]


@pytest.mark.parametrize("wrong", [one_slot_off, colliding])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_wrong_slots_are_found(models, helpers, tiny, monkeypatch, name, wrong):
    model = models(name)
    monkeypatch.setattr(paged.PagedStore, "slots_of", wrong(paged.PagedStore.slots_of))
    tier = choose(model)
    assert tier.name == "isolate"
    assert "gather: differs by" in tier.rejected[0]
    assert serve(model, helpers, tiny, tier)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba2", "deepseek_v32", "deepseek_v4"])
def test_state_in_the_facade_is_found(models, helpers, tiny, monkeypatch, name):
    """Even with masks that seem to be readable, a mixer that keeps more than keys and values is not gathered."""
    model = models(name)
    rules = {i: MaskRule("full") for i in range(len(model.loaded.built.layers))}
    monkeypatch.setattr(tiers, "read_masks", lambda *args: masks.Masks(rules, False))
    tier = choose(model)
    assert tier.name == "isolate"
    assert tier.rejected[0].startswith("gather: ")
    assert serve(model, helpers, tiny, tier)


def shared_cache(split, i, value):
    """Every sequence's mixers get the first one's cache: state is carried over."""
    return split.segments[0].cache if value is split.cache else NotImplemented


def swapped_arguments(split, i, value):
    """Every sequence gets the arguments of the one before it."""
    return split._recorded(i - 1, split.known[id(value)][1]) if id(value) in split.known else NotImplemented


def refused(split, i, value):
    raise isolate.NotIsolatable("something that cannot be split")


@pytest.mark.parametrize(
    "wrong, why",
    [(shared_cache, "isolate in batches: "), (swapped_arguments, "isolate in batches: "), (refused, "cannot be split")],
)
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v4", "llama"])
def test_a_wrong_isolation_is_found(models, helpers, tiny, monkeypatch, name, wrong, why):
    model = models(name)
    right = isolate._Split._of

    def of(self, i, value):
        out = wrong(self, i, value)
        return right(self, i, value) if out is NotImplemented else out

    monkeypatch.setattr(isolate._Split, "_of", of)
    tier = choose(model, allow=name != "llama")
    assert (tier.name, len(tier.rejected)) == ("serial", 2)
    assert why in tier.rejected[1]
    assert serve(model, helpers, tiny, tier)


def test_the_oracle_is_upstream(models):
    """What the tiers are compared with is the decoder's own output for each sequence alone, in pieces as in one."""
    model = models("llama")
    run = model.loaded.runner
    with torch.inference_mode():
        truth = oracle.find_truth(run.decoder, run.taps, None, model.loaded.vocab)
        assert not truth.whole
        parts = oracle._in_order(truth.walk, truth.hidden)
        for ids, part in zip(truth.walk.ids, parts, strict=True):
            at = torch.arange(ids.shape[1])[None]
            whole = run.decoder(cache=run.decoder.new_cache(), positions=at, ids=ids)[0]
            assert torch.allclose(part, whole, atol=1e-5)


@pytest.mark.parametrize("steps", [oracle._cut(), oracle._whole()])
def test_walks(steps):
    """Every token of every sequence once and in order; prefill beside decodes; the longest ends alone."""
    for i, n in enumerate(oracle.PROMPTS):
        mine = [(s, c) for step in steps for k, s, c in step if k == i]
        assert [p for s, c in mine for p in range(s, s + c)] == list(range(n + oracle.DECODES))
        assert [c for s, c in mine if s >= n] == [1] * oracle.DECODES
    assert any(len(step) == 3 and {c for _, _, c in step} > {1} for step in steps)
    assert any(len(step) == 3 and {c for _, _, c in step} == {1} for step in steps)
    assert len(steps[-1]) == 1


def test_a_prompt_that_must_not_be_cut(models, helpers, tiny):
    """Upstream's cache of this model starts anew with every chunk: so there is one, whatever the budget, and after a
    preemption outputs follow one at a time."""
    model = models("mamba")
    engine = model.engine(chunk=8, block=2, blocks=26, seqs=4)
    works = []
    right = engine.scheduler.next
    engine.scheduler.next = lambda: (batch := right()) and (works.extend(batch.work) or batch)
    jobs = [(str(i), c.tokens, helpers.greedy(tiny.NEW), {}) for i, c in enumerate(model.cases)]
    got, _, _ = helpers.drive(engine, jobs)
    assert [got[str(i)] for i in range(4)] == model.want
    assert engine.stats().preemptions > 0
    assert all(w.count == (w.seq.prompt if w.start == 0 else 1) for w in works)


def test_a_cache_that_forgets_what_the_mask_shows(tiny, tmp_path, loading, helpers, models):
    """The configuration names a window, which upstream's cache obeys and its mask does not."""
    folder = tiny.build("llama", tmp_path / "forgets", sliding_window=6)
    cases = tiny.prompts()
    want = [a.tokens for a in tiny.generate(folder, cases)]
    assert want != models("llama").want, "the window makes no difference"
    loaded = loading(folder)
    assert (loaded.tier.name, loaded.tier.whole) == ("isolate", True)
    assert any("drops keys" in r for r in loaded.tier.rejected)
    jobs = [(str(i), c.tokens, helpers.greedy(tiny.NEW), {}) for i, c in enumerate(cases)]
    got, _, _ = helpers.drive(models("llama").engine(runner=loaded.runner, chunk=5, block=4), jobs, every=2)
    assert [got[str(i)] for i in range(4)] == want


def test_state_outside_the_cache_is_refused(models, monkeypatch):
    """What a sequence gets depends on which ran before it: nothing could be served exactly."""
    model = models("llama")
    norm = model.loaded.built.decoder.norm
    right, last = norm.forward, [torch.zeros(1)]

    def forward(x):
        out = right(x) + last[0]
        last[0] = out.mean()
        return out

    monkeypatch.setattr(norm, "forward", forward)
    run = model.loaded.runner
    with pytest.raises(Refused, match="state outside its cache") as e, torch.inference_mode():
        oracle.find_truth(run.decoder, run.taps, None, model.loaded.vocab)
    assert e.value.code == "state_outside"


def test_a_head_that_is_not_upstreams_is_refused(models, monkeypatch):
    model = models("llama")
    right = type(model.loaded.runner.head).__call__
    monkeypatch.setattr(type(model.loaded.runner.head), "__call__", lambda self, x: right(self, x) * 1.01)
    run = model.loaded.runner
    with pytest.raises(Refused) as e, torch.inference_mode():
        oracle.check_whole(run.decoder, run.head, run.taps, None, model.loaded.vocab)
    assert e.value.code == "not_alike"
    assert "0.01 of the largest" in e.value.why


def test_a_decoder_that_raises_is_refused(models, monkeypatch):
    model = models("gemma2")

    def forward(*args, **kwargs):
        raise AttributeError("no attribute 'conv_state'")

    run = model.loaded.runner
    monkeypatch.setattr(model.loaded.built.layers[1], "forward", forward)
    with pytest.raises(Refused) as e, torch.inference_mode():
        oracle.find_truth(run.decoder, run.taps, None, model.loaded.vocab)
    assert e.value.code == "not_run"
    assert "conv_state" in e.value.why


def test_a_model_that_takes_no_text_alone(models, monkeypatch):
    model = models("llava")

    def forward(*args, **kwargs):
        raise ValueError("pixel_values are needed")

    run = model.loaded.runner
    monkeypatch.setattr(model.loaded.built.model, "forward", forward)
    with torch.inference_mode():
        why = oracle.check_whole(run.decoder, run.head, run.taps, run.wrapper.rows, model.loaded.vocab)
    assert "pixel_values are needed" in why


def test_a_plan_can_ask_for_isolate(models, helpers, tiny, loading):
    from dz.core.plan import Choice, Plan, SitePlan

    model = models("llama")
    phases = {p: Choice(impl="upstream", reason="", tier="isolate") for p in ("prefill", "decode")}
    site = SitePlan(site="model.layers.*.self_attn", op=None, status="known", count=3, phases=phases)
    plan = Plan(model="m", rev8="0", device="cpu", dtype="float32", sites=(site,))
    tier = loading(model.folder, plan=plan).tier
    assert tier.name == "isolate"
    assert "plan" in tier.rejected[0]


# --- masks


@given(
    kind=st.sampled_from(["full", "window", "chunk"]),
    size=st.integers(1, 9),
    queries=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    length=st.integers(1, 35),
)
@settings(max_examples=150, deadline=None)
def test_rules(kind, size, queries, length):
    rule = MaskRule(kind, 0 if kind == "full" else size)
    got = rule.allowed(torch.tensor(queries)[:, None], torch.arange(length)[None])
    for row, q in zip(got.tolist(), queries, strict=True):
        for k, seen in enumerate(row):
            near = {"full": True, "window": q - k < size, "chunk": k // size == q // size}[kind]
            assert seen == (k <= q and near)
    plain = MaskRule("full").allowed(torch.arange(length)[:, None], torch.arange(length)[None])
    mine = rule.allowed(torch.arange(length)[:, None], torch.arange(length)[None])
    assert not rule.trivial(length) or torch.equal(plain, mine)
    assert rule.trivial(length) or not torch.equal(plain, mine)


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("llama", ["full"] * 3),
        ("gpt_oss", ["window 6", "full", "window 6"]),
        ("gemma3", ["window 6", "full", "window 6"]),
        ("llama4_text", ["chunk 6", "full", "chunk 6"]),
        ("deepseek_v3", ["full"] * 3),
    ],
)
def test_rules_are_read_off_upstream(models, name, kinds):
    rules = models(name).loaded.tier.run.masks.rules
    assert [f"{r.kind} {r.size}".removesuffix(" 0") for _, r in sorted(rules.items())] == kinds


@pytest.mark.parametrize("size", [2, 5, 30, 100, 253, 254, 255, 256, 300])
@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_windows_of_any_size_are_read(tiny, tmp_path, loading, name, size):
    """Also such as reach from one end of the context to the other, where only its last tokens tell."""
    key = "sliding_window" if name == "gpt_oss" else "attention_chunk_size"
    other = {"window_of_something_else": 64, "chunk_of_something_else": 128}
    folder = tiny.build(name, tmp_path / name, **{key: size}, **other)
    tier = loading(folder).tier
    assert tier.name == "gather"
    rule = tier.run.masks.rules[0]
    if size >= 256:
        assert rule.trivial(256)
    else:
        assert (rule.kind, rule.size) == ("window" if name == "gpt_oss" else "chunk", size)


REPOSITORY = """
from transformers import MistralConfig, MistralForCausalLM


class OddConfig(MistralConfig):
    model_type = "odd"
    attribute_map = {"sliding_window": "reach"}

    def __init__(self, reach=None, **kwargs):
        super().__init__(**kwargs)
        self.reach = reach


class OddForCausalLM(MistralForCausalLM):
    config_class = OddConfig
"""


def test_a_window_by_another_name(tiny, tmp_path, loading, helpers):
    """Longer than the probe's sequences, and called what no other model calls it: it must be seen all the same."""
    folder = tiny.build("llama", tmp_path / "odd", attention_bias=False, mlp_bias=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "odd", "architectures": ["OddForCausalLM"], "reach": 24}
    config["auto_map"] = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "odd.py").write_text(REPOSITORY)
    loaded = loading(folder, trust=True)
    assert loaded.built.runs == "repository"
    assert set(loaded.tier.run.masks.rules.values()) == {MaskRule("window", 24)}


# --- the pool


def test_rows_that_hold_nothing_are_never_read(models, helpers, tiny):
    """Every slot that no sequence has written is poisoned before each step."""
    model = models("gpt_oss")
    engine = model.engine(chunk=7, block=4, blocks=64)
    store = engine.runner.tier.run.store
    right = store.exchange

    def exchange(layer, k, v):
        held = {x for s in engine.sequences.values() for x in store.slots_of(s.blocks, 0, s.computed)} | set(
            store.step.write.tolist()
        )
        free = torch.tensor([x for x in range(store.slots) if x not in held])
        if layer in store.keys:
            store.keys[layer][free] = float("nan")
            store.values[layer][free] = float("nan")
        return right(layer, k, v)

    store.exchange = exchange
    jobs = [(str(i), c.tokens, helpers.greedy(tiny.NEW), {}) for i, c in enumerate(model.cases)]
    got, _, _ = helpers.drive(engine, jobs, every=2)
    assert [got[str(i)] for i in range(len(jobs))] == model.want


def store(blocks=6, size=4):
    return paged.PagedStore(blocks=blocks, block_size=size, device="cpu")


def test_outside_a_step_the_pool_cannot_be_used():
    with pytest.raises(RuntimeError, match="outside a step"):
        store().exchange(0, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))


@given(data=st.data(), size=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_pool_returns_what_was_written(data, size):
    """Sequences of any length in scattered blocks, in chunks and as rows; keys and values of different widths."""
    pool = store(blocks=40, size=size)
    order = data.draw(st.permutations(range(40)))
    lengths = data.draw(st.lists(st.integers(1, 20 if size > 1 else 12), min_size=2, max_size=3))
    held, at = [], 0
    for n in lengths:
        held.append(list(order[at : at + -(-(n + 1) // size)]))
        at += len(held[-1])
    run = Gather.__new__(Gather)
    run.store = pool
    keys = [torch.randn(n + 1, 2, 3) for n in lengths]
    values = [torch.randn(n + 1, 2, 5) for n in lengths]

    def part(of, spans):
        """[1, H, S, D]: tokens [start, end) of each sequence in `spans`, packed."""
        return torch.cat([of[i][s:e] for i, s, e in spans]).transpose(0, 1)[None]

    def shares(spans):
        return [Share(held[i], s, torch.zeros(1, e - s), torch.arange(s, e)[None]) for i, s, e in spans]

    cuts = [data.draw(st.integers(1, n)) for n in lengths]
    first = [(i, 0, c) for i, c in enumerate(cuts)]
    rest = [(i, c, n) for i, (c, n) in enumerate(zip(cuts, lengths, strict=True)) if c < n]
    for spans in filter(None, (first, rest)):
        pool.step = run._index(shares(spans), rows=0)
        k, v = pool.exchange(7, part(keys, spans), part(values, spans))
        whole = [(i, 0, e) for i, _, e in spans]
        assert torch.equal(k, part(keys, whole))
        assert torch.equal(v, part(values, whole))
    ends = [(i, n, n + 1) for i, n in enumerate(lengths)]
    pool.step = run._index(shares(ends), rows=len(ends))
    k, v = pool.exchange(7, part(keys, ends).transpose(0, 2), part(values, ends).transpose(0, 2))
    for i, _, e in ends:
        assert torch.equal(k[i, :, :e], part(keys, [(i, 0, e)])[0])
        assert torch.equal(v[i, :, :e], part(values, [(i, 0, e)])[0])
    assert pool.bytes == 40 * size * 2 * (3 + 5) * 4
