"""Every tensor of a checkpoint into upstream's model, accounted for in both directions."""

import shutil

import pytest
import torch

from dz.errors import Refused
from dz.upstream.build import build_meta
from dz.upstream.weights import coverage, load, refuse_incomplete
from dz.weights.checkpoint import open_checkpoint

NAMES = [
    "llama",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v4",
    "qwen3_next",
    "mamba2",
    "lfm2",
    "qwen3_vl",
    "gemma3",
]


@pytest.fixture(scope="module")
def built_in(tiny, tmp_path_factory):
    """built_in(name): a folder with this checkpoint, never changed."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tiny.build(name, tmp_path_factory.mktemp("weights") / name)
        return made[name]

    return get


@pytest.fixture
def copy(built_in, tmp_path):
    """copy(name): a folder with this checkpoint, the test's own."""
    return lambda name: shutil.copytree(built_in(name), tmp_path / name)


def covered(source, ignore=()):
    return coverage(build_meta(source, trust=False), open_checkpoint(source).headers(), list(ignore))


def loaded(source, dtype=torch.float32, ignore=()):
    built, checkpoint = build_meta(source, trust=False, dtype=dtype), open_checkpoint(source)
    found = load(built, checkpoint.headers(), checkpoint.get, "cpu", list(ignore))
    return built, found


@pytest.mark.parametrize("name", NAMES)
def test_everything_arrives(built_in, tiny, name):
    """The same values as upstream's own loading, parameter by parameter and buffer by buffer, computed ones too."""
    source = tiny.source(built_in(name))
    count = len(open_checkpoint(source))
    on_meta = covered(source)
    assert on_meta.complete
    assert on_meta.matched == count
    built, found = loaded(source)
    assert found == on_meta
    want = tiny.upstream(built_in(name))
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(want, kind)(remove_duplicate=False))
        got = dict(getattr(built.model, kind)(remove_duplicate=False))
        assert got.keys() == expected.keys()
        for k, v in got.items():
            assert v.device.type == "cpu", k
            assert torch.equal(v, expected[k]), k
            assert not v.requires_grad


def test_coverage_changes_nothing(built_in, tiny):
    source = tiny.source(built_in("qwen3_moe"))
    built, checkpoint = build_meta(source, trust=False), open_checkpoint(source)
    before = {k: (v.device.type, v.dtype, v.shape) for k, v in built.model.state_dict().items()}
    assert {d for d, _, _ in before.values()} == {"meta"}
    for _ in range(2):
        assert coverage(built, checkpoint.headers()).complete
    assert {k: (v.device.type, v.dtype, v.shape) for k, v in built.model.state_dict().items()} == before
    load(built, checkpoint.headers(), checkpoint.get, "cpu")
    assert {v.device.type for v in built.model.state_dict().values()} == {"cpu"}


Q = "model.layers.1.self_attn.q_proj.weight"


def test_a_renamed_tensor(copy, tiny):
    folder = copy("llama")
    found = covered(tiny.rewrite(folder, {Q: None, Q.replace("q_proj", "query"): tiny.tensors(folder)[Q]}))
    assert found.missing == (Q,)
    assert found.unexpected == (Q.replace("q_proj", "query"),)
    assert found.shape_changed == ()


def test_a_missing_and_an_extra_tensor(copy, tiny):
    found = covered(tiny.rewrite(copy("llama"), {Q: None}))
    assert (found.missing, found.unexpected, found.shape_changed) == ((Q,), (), ())
    found = covered(tiny.rewrite(copy("gpt_oss"), {"model.layers.9.x": torch.zeros(3)}))
    assert (found.missing, found.unexpected, found.shape_changed) == ((), ("model.layers.9.x",), ())


def test_another_shape(copy, tiny):
    found = covered(tiny.rewrite(copy("llama"), {Q: torch.zeros(32, 31)}))
    assert (found.missing, found.unexpected) == ((), ())
    (fault,) = found.shape_changed
    assert fault.startswith(Q)
    assert "[32, 31]" in fault
    assert "[32, 32]" in fault


def test_a_transposed_matrix_is_another_shape(copy, tiny):
    k = "model.layers.0.mlp.down_proj.weight"
    folder = copy("llama")
    found = covered(tiny.rewrite(folder, {k: tiny.tensors(folder)[k].T}))
    assert len(found.shape_changed) == 1


def test_three_lists_before_anything_is_read(copy, tiny):
    folder = copy("llama")
    source = tiny.rewrite(folder, {Q: None, "left.over": torch.zeros(2), "lm_head.weight": torch.zeros(97, 31)})
    built, checkpoint = build_meta(source, trust=False), open_checkpoint(source)
    asked = []
    with pytest.raises(Refused) as e:
        refuse_incomplete(coverage(built, checkpoint.headers()))
        load(built, checkpoint.headers(), asked.append, "cpu")
    assert asked == []
    why = e.value.why
    assert f"1 missing: {Q}" in why
    assert "1 unexpected: left.over" in why
    assert "1 shape changed: lm_head.weight" in why
    assert e.value.code == "coverage"


def test_load_itself_refuses_too(copy, tiny):
    source = tiny.rewrite(copy("llama"), {Q: None})
    with pytest.raises(Refused, match="does not fit"):
        loaded(source)


def test_long_lists_are_cut(copy, tiny):
    extra = {f"more.{i:02d}": torch.zeros(1) for i in range(30)}
    source = tiny.rewrite(copy("llama"), extra)
    with pytest.raises(Refused) as e:
        refuse_incomplete(covered(source))
    assert "30 unexpected" in e.value.why
    assert "and 22 more" in e.value.why


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64])
def test_packed_forms_are_not_taken_for_numbers(copy, tiny, dtype):
    """A quantised tensor of the right name and shape would load as small integers, silently."""
    folder = copy("llama")
    packed = torch.randint(0, 100, (32, 32)).to(dtype)
    source = tiny.rewrite(folder, {Q: packed})
    found = covered(source)
    (fault,) = found.shape_changed
    assert fault.startswith(f"{Q}: stored as ")
    with pytest.raises(Refused):
        loaded(source)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_packed_experts_are_not_taken_for_numbers(copy, tiny, dtype):
    """The same where upstream renames and merges them."""
    folder = copy("qwen3_moe")
    k = "model.layers.1.mlp.experts.2.up_proj.weight"
    held = tiny.tensors(folder)
    assert k in held, sorted(held)
    found = covered(tiny.rewrite(folder, {k: torch.randint(0, 100, held[k].shape).to(dtype)}))
    (fault,) = found.shape_changed
    assert fault.startswith(k)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_plain_floats_are_converted(copy, tiny, stored):
    folder = copy("llama")
    held = tiny.tensors(folder)
    source = tiny.rewrite(folder, {k: v.to(stored) for k, v in held.items()})
    built, _ = loaded(source, torch.float32)
    assert torch.equal(built.model.state_dict()[Q], held[Q].to(stored).float())


def test_experts_are_merged(built_in, tiny):
    held = tiny.tensors(built_in("qwen3_moe"))
    built, _ = loaded(tiny.source(built_in("qwen3_moe")))
    params = dict(built.model.named_parameters())
    at = "model.layers.2.mlp.experts."
    for e in range(6):
        gate, up, down = (held[f"{at}{e}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        assert torch.equal(params[at + "gate_up_proj"][e], torch.cat([gate, up]))
        assert torch.equal(params[at + "down_proj"][e], down)


DOWN = "model.layers.1.mlp.experts.{}.down_proj.weight"


def test_a_misnumbered_expert(copy, tiny):
    """The stack would have the right shape, with every later expert in its neighbour's place."""
    folder = copy("qwen3_moe")
    held = tiny.tensors(folder)
    source = tiny.rewrite(folder, {DOWN.format(3): None, DOWN.format(7): held[DOWN.format(3)]})
    found = covered(source)
    assert (found.missing, found.unexpected) == ((DOWN.format(3),), (DOWN.format(7),))
    with pytest.raises(Refused):
        loaded(source)


def test_a_missing_expert(copy, tiny):
    found = covered(tiny.rewrite(copy("qwen3_moe"), {DOWN.format(3): None}))
    assert DOWN.format(3) in found.missing
    assert found.unexpected == ()


def test_an_expert_too_many(copy, tiny):
    folder = copy("qwen3_moe")
    held = tiny.tensors(folder)
    of = lambda e: {k: v for k, v in held.items() if f"layers.1.mlp.experts.{e}." in k}  # noqa: E731
    found = covered(tiny.rewrite(folder, {k.replace("experts.5", "experts.6"): v for k, v in of(5).items()}))
    assert not found.complete
    assert "layers.1.mlp.experts" in " ".join(found.shape_changed)


def test_a_misshapen_expert(copy, tiny):
    folder = copy("qwen3_moe")
    found = covered(tiny.rewrite(folder, {DOWN.format(3): tiny.tensors(folder)[DOWN.format(3)][:, :-1]}))
    assert not found.complete
    assert "layers.1.mlp.experts" in " ".join(found.shape_changed)


def test_loading_twice_gives_the_same(built_in, tiny):
    source = tiny.source(built_in("gpt_oss"))
    a, b = loaded(source)[0], loaded(source)[0]
    for (name, x), (_, y) in zip(a.model.named_parameters(), b.model.named_parameters(), strict=True):
        assert torch.equal(x, y), name
        assert x.data_ptr() != y.data_ptr()


def test_tied_heads(copy, tiny):
    """One tensor in the file, one in memory; a copy under the tied name is accounted for too."""
    folder = copy("gemma3")
    table = next(k for k in tiny.tensors(folder) if "embed_tokens" in k)
    assert not [k for k in tiny.tensors(folder) if "lm_head" in k]
    built, found = loaded(tiny.source(folder))
    assert found.tied
    assert found.complete
    assert built.model.get_output_embeddings().weight is built.model.get_input_embeddings().weight
    assert torch.equal(built.model.get_output_embeddings().weight, tiny.tensors(folder)[table])
    again = tiny.rewrite(folder, {"lm_head.weight": tiny.tensors(folder)[table]})
    built, found = loaded(again)
    assert found.complete
    assert built.model.get_output_embeddings().weight is built.model.get_input_embeddings().weight


def test_a_tied_model_without_its_table(copy, tiny):
    folder = copy("gemma3")
    table = next(k for k in tiny.tensors(folder) if "embed_tokens" in k)
    found = covered(tiny.rewrite(folder, {table: None}))
    assert not found.complete
    assert len(found.missing) == 1


def test_ignored_by_the_class(copy, tiny):
    """What the class names in `_keys_to_ignore_on_load_unexpected` stays out, and is listed with its bytes."""
    folder = copy("deepseek_v3")
    name = "model.layers.61.enorm.weight"
    cls = build_meta(tiny.source(folder), trust=False).model
    assert any("61" in p for p in cls._keys_to_ignore_on_load_unexpected)
    found = covered(tiny.rewrite(folder, {name: torch.zeros(5, 7)}))
    assert found.complete
    assert found.ignored == {name: 140}
    assert found.ignored_by[name].startswith("class: ")


def test_ignored_by_a_recipe(copy, tiny):
    folder = copy("llama")
    source = tiny.rewrite(folder, {"mtp.0.a": torch.zeros(4), "mtp.1.b": torch.zeros(2, dtype=torch.uint8)})
    assert covered(source).unexpected == ("mtp.0.a", "mtp.1.b")
    found = covered(source, ["mtp.0.*", "other.*"])
    assert found.unexpected == ("mtp.1.b",)
    assert (found.ignored, found.ignored_by) == ({"mtp.0.a": 16}, {"mtp.0.a": "recipe: mtp.0.*"})
    _, found = loaded(source, ignore=["mtp.*"])
    assert found.complete
    assert sum(found.ignored.values()) == 18


def test_a_glob_never_hides_what_the_model_needs(copy, tiny):
    found = covered(tiny.rewrite(copy("llama"), {Q: None}), ["*"])
    assert found.missing == (Q,)


def test_what_upstream_keeps_in_float32_stays(built_in, tiny):
    """Router biases near each other would collapse in bfloat16."""
    held = tiny.tensors(built_in("deepseek_v3"))
    built, _ = loaded(tiny.source(built_in("deepseek_v3")), torch.bfloat16)
    state = built.model.state_dict()
    k = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert state[k].dtype == torch.float32
    assert torch.equal(state[k], held[k])
    assert state["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_served_depends_on_the_file(copy, tiny, dtype, loading):
    """The weight file is overwritten in place after the load: the model does not notice."""
    folder = copy("deepseek_v3")
    built = loading(folder, dtype=str(dtype).removeprefix("torch.")).built
    before = {k: v.clone() for k, v in built.model.state_dict().items()}
    path = folder / "model.safetensors"
    with path.open("r+b") as f:
        f.write(b"\xff" * path.stat().st_size)
    for k, v in built.model.state_dict().items():
        assert torch.equal(v, before[k]), k
