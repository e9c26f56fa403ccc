"""Upstream's decoder and head called from outside; its caches; what they cost."""

import pytest
import torch

from dz.errors import Refused
from dz.upstream.build import build_meta
from dz.upstream.cache import bytes_in, make_facade, make_past, new_cache, tensors_in
from dz.upstream.decoder import Decoder, Head, cache_argument, mixers, replaced
from dz.upstream.footprint import Footprint, footprint, measure
from dz.upstream.rope import Snapshot, following
from dz.upstream.weights import load
from dz.weights.checkpoint import open_checkpoint

NAMES = [
    "llama",
    "gpt_oss",
    "gemma2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "qwen3_next",
    "mamba2",
    "lfm2",
    "qwen3_vl",
    "gemma3",
]


COUNTERS = 4 * 8  # bytes: some layers of an empty cache hold a counter as a tensor


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    """models(name): (folder, Built on meta, Built with weights)."""
    made = {}

    def get(name):
        if name not in made:
            folder = tiny.build(name, tmp_path_factory.mktemp("decoder") / name)
            source = tiny.source(folder)
            on_meta, built = (build_meta(source, trust=False, dtype=torch.float32) for _ in range(2))
            checkpoint = open_checkpoint(source)
            load(built, checkpoint.headers(), lambda n: checkpoint.get(n).clone(), "cpu")
            made[name] = (folder, on_meta, built)
        return made[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_decoder_and_head_are_upstream(models, tiny, name):
    """In one piece and in two, the logits are those of upstream's whole model (soft caps and scales included)."""
    folder, _, built = models(name)
    decoder, head = Decoder(built), Head(built)
    ids = torch.tensor([tiny.prompts()[2].tokens])
    n = ids.shape[1]
    with torch.no_grad():
        want = tiny.upstream(folder)(input_ids=ids).logits[0]
        whole = decoder(cache=new_cache(built.text_config), positions=torch.arange(n)[None], ids=ids)
        cache = new_cache(built.text_config)
        parts = [
            decoder(cache=cache, positions=torch.arange(a, b)[None], ids=ids[:, a:b]) for a, b in ((0, 11), (11, n))
        ]
        assert torch.allclose(head(whole[0]), want, atol=2e-5)
        assert torch.allclose(head(torch.cat(parts, 1)[0]), want, atol=2e-4)
        some = head(whole[0][[3, 7]])
    assert some.dtype == torch.float32
    assert torch.allclose(some, want[[3, 7]], atol=2e-5)


@pytest.mark.parametrize(
    "name, count",
    [("llama", 3), ("deepseek_v4", 4), ("qwen3_next", 3), ("mamba2", 3), ("lfm2", 3), ("qwen3_vl", 3)],
)
def test_mixers(models, name, count):
    """One in each layer here; each takes upstream's cache, and none is an MLP."""
    _, on_meta, _ = models(name)
    found = [m for layer in on_meta.layers for m in mixers(layer)]
    assert len(found) == count
    assert all(cache_argument(m) for _, m in found)
    assert not [n for n, _ in found if "mlp" in n or "norm" in n]


def test_replaced_is_undone():
    module = torch.nn.Linear(2, 2)
    x = torch.zeros(1, 2)
    with replaced(module, lambda x: "a"):
        with pytest.raises(ValueError, match="stop"), replaced(module, lambda x: "b"):
            assert module(x) == "b"
            raise ValueError("stop")
        assert module(x) == "a"
    assert "forward" not in vars(module)
    assert isinstance(module(x), torch.Tensor)


def test_a_decoder_without_cache_is_refused(models):
    _, on_meta, _ = models("llama")

    class Plain(torch.nn.Module):
        def forward(self, input_ids):
            return input_ids

    changed = type(on_meta)(**{f: getattr(on_meta, f) for f in on_meta.__slots__} | {"decoder": Plain()})
    with pytest.raises(Refused, match="Plain takes no cache"):
        Decoder(changed)


# --- caches


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_cache(models, tiny, name):
    """Every tensor of upstream's cache once, whatever its layers call it; the same length costs the same."""
    _, _, built = models(name)
    decoder = Decoder(built)
    sizes = []
    for n in (8, 8, 24):
        cache = new_cache(built.text_config)
        assert bytes_in(cache) <= COUNTERS
        with torch.no_grad():
            decoder(cache=cache, positions=torch.arange(n)[None], ids=torch.zeros(1, n, dtype=torch.long))
        held = list(tensors_in(cache))
        assert len({id(t) for t in held}) == len(held)
        sizes.append(bytes_in(cache))
    assert sizes[0] == sizes[1] > 0
    assert (sizes[2] > sizes[0]) == (name != "mamba2")


def test_the_facade_asks_the_store(models):
    _, _, built = models("gpt_oss")
    seen = []

    class Store:
        def exchange(self, layer, k, v):
            seen.append((layer, tuple(k.shape), tuple(v.shape)))
            return k, v

    facade = make_facade(Store(), built.text_config)
    with torch.no_grad():
        Decoder(built)(cache=facade, positions=torch.arange(5)[None], ids=torch.zeros(1, 5, dtype=torch.long))
    assert seen == [(i, (1, 2, 5, 8), (1, 2, 5, 8)) for i in range(3)]
    assert (facade.get_seq_length(), facade.get_mask_sizes(5), facade.get_query_offset()) == (0, (5, 0), 0)
    assert bytes_in(facade.layers) <= COUNTERS


def test_a_past_only_claims_to_hold_something(models):
    _, _, built = models("gemma2")
    past = make_past(built.text_config, 37)
    assert (past.get_seq_length(), past.get_mask_sizes(3), past.get_query_offset()) == (37, (40, 0), 37)
    assert bytes_in(past) <= COUNTERS


# --- footprint


@pytest.mark.parametrize("name", NAMES)
def test_the_footprint_on_meta_is_the_real_one(models, name):
    """Counted without a weight, or said why not; the same figures as measured; the model is as it was."""
    _, on_meta, built = models(name)
    before = {n: (b.device.type, b.data_ptr()) for n, b in on_meta.model.named_buffers()}
    found = footprint(on_meta, Decoder(on_meta))
    assert {n: (b.device.type, b.data_ptr()) for n, b in on_meta.model.named_buffers()} == before
    real = measure(built, Decoder(built))
    assert isinstance(found, Footprint), found
    assert found == real


@pytest.mark.parametrize(
    "name, per_token, per_sequence",
    [
        ("llama", 3 * 2 * 2 * 8 * 4, 0),  # layers, K and V, heads, width, bytes
        ("gpt_oss", 3 * 2 * 2 * 8 * 4, 0),  # windows count in full: the pool keeps all
        ("deepseek_v3", 3 * (16 + 8) * 4, 0),  # latent and rotary key
        ("deepseek_v32", 3 * (16 + 8 + 16) * 4, 0),  # and the indexer's key; or what the latent expands to
        ("qwen3_next", 2 * 2 * 8 * 4, 2 * (64 * 4 + 4 * 8 * 8) * 4),  # one attention; conv and delta state of two
        ("lfm2", 2 * 2 * 8 * 4, 2 * 32 * 3 * 4),
        ("mamba2", 0, 3 * ((64 + 2 * 2 * 16) * 4 + 8 * 8 * 16) * 4),
    ],
)
def test_the_footprint_by_formula(models, name, per_token, per_sequence):
    _, _, built = models(name)
    found = measure(built, Decoder(built))
    assert found.per_token == per_token or (name, found.per_token) == ("deepseek_v32", 3 * (4 * (20 + 16) + 16) * 4)
    assert found.per_sequence == per_sequence


# --- ropes


def test_ropes_that_follow(models, tiny, tmp_path):
    assert following(models("llama")[1].model) is None
    assert following(models("gemma3")[1].model) is None
    build = lambda name: build_meta(tiny.source(tiny.build(name, tmp_path / name)), trust=False).model  # noqa: E731
    dynamic, long = following(build("dynamic")), following(build("longrope"))
    assert (dynamic.length, dynamic.restarts) == (20, False)
    assert (long.length, long.restarts) == (20, True)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_calls_do_not_see_each_other(models, tiny, name):
    """A short, a long and a middle call in any order: each is what it is in a fresh model."""
    folder, _, built = models(name)
    decoder = Decoder(built)
    decoder.settle()

    def run(n, call):
        ids = torch.arange(3, 3 + n)[None] % 80
        with torch.no_grad():
            return call(ids, torch.arange(n)[None])

    ours = lambda ids, at: decoder(cache=new_cache(built.text_config), positions=at, ids=ids)  # noqa: E731
    want = {
        n: run(n, lambda ids, at: tiny.upstream(folder).model(input_ids=ids).last_hidden_state) for n in (5, 21, 30, 60)
    }
    for n in (5, 60, 21, 30, 5, 21, 60, 30):
        assert torch.allclose(run(n, ours), want[n], atol=1e-5), n


def test_a_snapshot_puts_everything_back():
    module = torch.nn.Module()
    module.register_buffer("a", torch.ones(2), persistent=False)
    module.register_buffer("none", None)
    module.longest, module.name = 4, "x"
    held = module.a
    kept = Snapshot([module])
    module.a.mul_(3)
    module.register_buffer("b", torch.zeros(1))
    module.longest, module.name, module.extra = 9, "y", torch.zeros(3)
    kept.restore()
    assert module.a is held
    assert module.a.tolist() == [1, 1]
    assert (module.longest, module.name) == (4, "y")
    assert not hasattr(module, "b")
    assert not hasattr(module, "extra")
    module.register_buffer("a", torch.full((2,), 5.0))
    kept.restore()
    assert module.a is held
