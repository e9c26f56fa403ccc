"""Tiny models, each built and loaded once, and engines of any pool size over them."""

import contextlib
import dataclasses
from pathlib import Path

import pytest


@dataclasses.dataclass
class Model:
    """A checkpoint, what upstream generates from it, and dz's runner for it."""

    name: str
    folder: Path
    tier: str
    cases: list
    want: list
    margin: float
    loaded: object
    said: list

    def engine(self, *, chunk=512, block=16, blocks=64, seqs=8, longest=256, eos=frozenset(), runner=None):
        """An engine with pools of its own over the loaded weights."""
        from dz.engine.cache.paged import PagedStore
        from dz.engine.config import Limits
        from dz.engine.engine import Engine
        from dz.engine.mixers.gather import Gather

        run = self.loaded.runner
        if isinstance(run.tier.run, Gather):
            old = run.tier.run
            store = PagedStore(blocks=blocks, block_size=block, device="cpu")
            tier = dataclasses.replace(run.tier, run=Gather(old.decoder, old.taps, store, old.masks))
            run = type(run)(run.built, run.decoder, run.taps, run.head, run.wrapper, tier, run.phase)
        limits = Limits(
            max_model_len=longest,
            max_num_seqs=seqs,
            max_num_batched_tokens=chunk,
            block_size=block,
            blocks=blocks,
            slots=seqs,
        )
        return Engine(run if runner is None else runner, limits, eos=eos, vocab=self.loaded.vocab)


def load(tiny, folder, *, trust=False, said=None, plan=None, **wishes):
    """dz.engine.loader.load with everything at its default for a tiny float32 model."""
    from dz.engine.loader import Wishes
    from dz.engine.loader import load as load_model

    given = {
        "dtype": "float32",
        "max_model_len": 0,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "num_blocks": 0,
        "device": "cpu",
        "budget": 1 << 30,
        **wishes,
    }
    said = said if said is not None else []
    bind = lambda model, plan, phase: contextlib.nullcontext()  # noqa: E731
    return load_model(tiny.source(folder), plan, Wishes(**given), trust=trust, bind=bind, tell=said.append)


@pytest.fixture(scope="session")
def loading(tiny):
    """`load` for a folder of the test's own."""
    return lambda folder, **wishes: load(tiny, folder, **wishes)


@pytest.fixture(scope="session")
def models(tiny, tmp_path_factory):
    """models(name): the Model of this name, made on first use."""
    made = {}

    def get(name):
        if name not in made:
            folder = tiny.build(name, tmp_path_factory.mktemp("tiny") / name)
            cases = tiny.prompts() + (tiny.images(name) if tiny.MODELS[name].vision else [])
            answers = tiny.answers(name, folder, cases)
            want, margin = [a.tokens for a in answers], min(a.margin for a in answers)
            tier, said = tiny.MODELS[name].tier, []
            made[name] = Model(name, folder, tier, cases, want, margin, load(tiny, folder, said=said), said)
        return made[name]

    return get


def drive(engine, jobs, *, every=0, limit=2000):
    """Run `jobs` [(id, tokens, Sampling, media)], one more each `every` steps (0: all at once).

    Returns ({id: tokens}, {id: finish}, every Output). Fails when nothing moves."""
    left, got, ends, said = list(jobs), {}, {}, []
    for step in range(limit):
        while left and (not every or step % every == 0):
            engine.submit(*left.pop(0))
            if every:
                break
        for o in engine.step():
            said.append(o)
            got.setdefault(o.id, []).extend(o.tokens)
            if o.finish:
                assert o.id not in ends, f"{o.id} ended twice"
                ends[o.id] = o.finish
        if not left and engine.idle:
            return got, ends, said
    raise AssertionError(f"not finished after {limit} steps: {engine.stats()}")


def greedy(n, **more):
    """Greedy sampling of n tokens."""
    from dz.core.messages import Sampling

    return Sampling(max_tokens=n, temperature=0.0, **more)


def assert_idle(engine):
    """Nothing is held any more."""
    s = engine.scheduler
    assert engine.idle
    assert (s.admission.blocks.used, s.admission.slots.used, len(s.running), len(s.waiting)) == (0, 0, 0, 0)
    assert engine.sequences == {}
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)


@pytest.fixture(scope="session")
def helpers():
    """drive, greedy and assert_idle, for test modules."""
    import types

    return types.SimpleNamespace(drive=drive, greedy=greedy, assert_idle=assert_idle)
