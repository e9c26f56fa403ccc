"""Does it fit, on what: splits, longest contexts, estimates and ops, on repositories that hold no weight."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dz import settings
from dz.adapt.fit import make_fit
from dz.adapt.fit.splits import Budget, converted_bytes, splits, widths
from dz.backends import planned, profile
from dz.core.envelope import envelope, validate
from dz.core.registry import Registry
from dz.core.source import FileEntry, Source
from dz.errors import Refused, UsageError
from dz.hub.stamp import code_hash
from dz.inspect.ledger import Ledger, Row
from dz.inspect.outline import outline

GB = 10**9
DENSE = {
    "model_type": "never_heard_of",
    "dtype": "bfloat16",
    "vocab_size": 1000,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 4096,
    "max_position_embeddings": 1 << 20,
}


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


@pytest.fixture
def plain():
    return settings.resolve({}, no_config=True)


def source(folder: Path) -> Source:
    files = tuple(
        FileEntry(path=p.relative_to(folder).as_posix(), size=p.stat().st_size) for p in sorted(folder.iterdir())
    )
    pin = code_hash(folder, [f.path for f in files])
    return Source(name=str(folder), folder=str(folder), commit="", rev8="0" * 8, code_hash=pin, files=files)


def book(experts=0, dense=0, whole=0, count=0, packed=0):
    rows = [("experts", "experts", experts), ("linear", "matrix", dense), ("norm", "whole", whole)]
    made = tuple(
        Row(op=op, format="BF16", split=split, tensors=1, values=n // 2, bytes=n) for op, split, n in rows if n
    )
    return Ledger(
        rows=made, tensors=3, total=experts + dense + whole, layers=4, experts=count, layer_experts=packed,
        packed_experts=packed,
    )  # fmt: skip


def budget(**more):
    return Budget(**{"share": 0.9, "tokens": 2048, "sequences": 16, "itemsize": 2, "converted": 0, **more})


def test_what_lies_on_each_device():
    shape, device = outline(DENSE), profile("H200x8")
    rows = {r.name: r for r in splits(book(80 * GB, 16 * GB, GB, 64), shape, device, budget())}
    assert set(rows) == {"EP8 TP8", "EP8 TP4 x DP2"}
    wide, narrow = rows["EP8 TP8"], rows["EP8 TP4 x DP2"]
    assert (wide.experts, wide.dense, narrow.experts, narrow.dense) == (10 * GB, 3 * GB, 10 * GB, 5 * GB)
    for r in rows.values():
        assert r.weights == r.experts + r.dense and r.left == device.memory - r.weights
        assert r.room == int(device.memory * 0.9) - r.weights - r.workspace - r.activations
    # 4 key-value heads: eight ways keep as much each as four
    assert wide.per_token == narrow.per_token == 4 * 2 * 64 * 2


def test_experts_that_do_not_divide_are_cut():
    (first, *_) = splits(book(80 * GB, 16 * GB, 0, 60), outline(DENSE), profile("H200x8"), budget())
    assert first.name == "TP8, experts cut" and first.experts == 10 * GB and first.ep == 1


@pytest.mark.parametrize(("count", "found"), [(1, [1]), (2, [2, 1]), (4, [4, 2, 1]), (8, [8, 4]), (32, [16, 8, 4])])
def test_sensible_widths(count, found):
    assert list(widths(outline(DENSE), count)) == found


def test_heads_bound_the_width():
    assert list(widths(outline({**DENSE, "num_attention_heads": 12}), 8)) == [4]


def test_longest_context_and_sequences():
    shape, device = outline(DENSE), profile("H200")
    (row,) = splits(book(dense=100 * GB), shape, device, budget())
    token = 4 * 4 * 2 * 64 * 2
    assert row.per_token == token and row.longest == 1 << 20 and row.bound == "model"
    assert {c.tokens: c.sequences for c in row.contexts}[8192] == row.room // (8192 * token)
    (tight,) = splits(book(dense=int(device.memory * 0.9) - 2 * GB), shape, device, budget())
    assert tight.bound == "memory" and tight.longest == int(tight.room / token) and tight.fits


def test_too_large_says_by_how_much():
    (row,) = splits(book(dense=200 * GB), outline(DENSE), profile("H200"), budget())
    assert not row.fits and row.bound == "weights" and row.longest == 0
    assert row.verdict == "no: weights alone lack 49.2 GB on each"
    (nearly,) = splits(book(dense=140 * GB), outline(DENSE), profile("H200"), budget())
    assert nearly.verdict.startswith("no: lacks 4.") and nearly.left > 0


@pytest.mark.parametrize(("name", "size"), [("A100", 2), ("H200", 1), ("B200", 0), ("MI300X", 1), ("MI355X", 0)])
def test_conversion_by_what_a_device_computes_in(name, size):
    assert converted_bytes(profile(name)) == size
    (row, *_) = splits(book(GB, GB, 0, 8, packed=64_000_000), outline(DENSE), profile(name), budget(converted=size))
    assert row.workspace == 64_000_000 * size


@pytest.mark.parametrize(
    ("spec", "known"), [("H200x8", True), ("mi300x", True), ("B300 x2", True), ("cpu", False), ("cuda:sm90", False)]
)
def test_a_profile_is_a_device_to_plan_for(spec, known):
    assert planned(spec) is known


def test_a_configuration_and_nothing_else(tmp_path, plain, registry):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    fit = make_fit(source(tmp_path), trust=False, device="H100x2", settings=plain, registry=registry)
    validate(envelope("fit", fit, status="fits"))
    assert fit.known_from == "configuration" and fit.band == pytest.approx(0.1)
    assert fit.bytes == pytest.approx(2 * outline(DENSE).parameters, rel=1e-3)
    assert {r.name for r in fit.splits} == {"TP2", "TP1 x DP2"} and all(r.fits for r in fit.splits)


@pytest.mark.parametrize(
    ("more", "band"),
    [
        ({"layer_types": ["squiggle"] * 4}, 0.35),
        ({"vision_config": {"hidden_size": 256, "num_hidden_layers": 9}}, 0.12),
    ],
)
def test_the_band_grows_with_what_is_not_known(tmp_path, plain, registry, more, band):
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, **more}))
    fit = make_fit(source(tmp_path), trust=False, device="H100", settings=plain, registry=registry)
    assert fit.band >= band and fit.band_reason


@pytest.mark.parametrize(
    ("quant", "bits", "experts"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2, 8 + 32 / 128**2),
        ({"quant_method": "mxfp4"}, 16, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 16, 4.5),
    ],
)
def test_declared_formats_in_an_estimate(tmp_path, plain, registry, quant, bits, experts):
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "quantization_config": quant}
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, **moe}))
    fit = make_fit(source(tmp_path), trust=False, device="H100", settings=plain, registry=registry)
    rows = {r.op: r for r in fit.rows}
    assert 8 * rows["linear"].bytes / rows["linear"].values == pytest.approx(bits, rel=1e-4)
    assert 8 * rows["experts"].bytes / rows["experts"].values == pytest.approx(experts, rel=1e-4)


def test_every_op_has_an_answer(giant, tmp_path, plain, registry):
    giant.write(tmp_path, *giant.trillion(layers=5, experts=8))
    for device in ("H200x2", "CPU-64G", "MI355X"):
        fit = make_fit(source(tmp_path), trust=False, device=device, settings=plain, registry=registry)
        validate(envelope("fit", fit, status="does not fit"))
        ops = {o.op: o for o in fit.ops}
        assert {"experts", "embedding", "linear", "router", "mla", "residual_mix", "mxfp4_unpack"} <= set(ops)
        assert fit.unaccounted == 0 and any("without a class" in n for n in fit.notes)
        assert not any("kernel" in n for n in fit.notes)
    (unpack,) = (o for o in fit.ops if o.op == "mxfp4_unpack")
    assert any("needs" in r for r in unpack.rejected) or "mxfp4_unpack/" in unpack.prefill


LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
SPACE = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 64, "layer_types": ["mamba"] * 4}
NEEDS = {
    "grouped heads": ({}, {"attention", "paged_attention", "gated_activation"}),
    "latents with an index": (
        {**LATENT, "index_head_dim": 32, "index_n_heads": 4}, {"mla", "mla_decode", "index_scores", "index_topk"}
    ),
    "blocks": (
        {"index_head_dim": 32, "index_n_heads": 4, "index_topk_blocks": 2}, {"block_select", "block_sparse_attention"}
    ),
    "delta by channel": ({"layer_types": ["linear_attention"] * 4, "linear_num_heads": 4}, {"kda", "kda_decode"}),
    "delta by head": (
        {"layer_types": ["linear_attention"] * 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
        {"gated_delta_rule"},
    ),
    "state space": (SPACE, {"mamba2_scan"}),
    "no gate": ({"hidden_act": "relu2"}, {"feed_forward"}),
    "streams": ({"hc_mult": 2}, {"hyper_connection"}),
    "snapshots": ({"attn_res_block_size": 2}, {"residual_mix"}),
}  # fmt: skip


@pytest.mark.parametrize(("more", "needed"), NEEDS.values(), ids=NEEDS)
def test_the_ops_that_a_configuration_asks_for(tmp_path, plain, registry, more, needed):
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, **more}))
    fit = make_fit(source(tmp_path), trust=False, device="H200", settings=plain, registry=registry)
    ops = {o.op: o for o in fit.ops}
    assert needed & set(registry.ops) <= set(ops) and needed & set(ops)
    if "index_topk" in needed:  # its scores are float32 whatever the model's dtype is
        assert ops["index_topk"].prefill == "index_topk/triton"


@pytest.mark.parametrize(("device", "native"), [("H200", True), ("MI300X", False), ("MI355X", True), ("A100", False)])
def test_a_format_is_native_only_as_it_is_stored(giant, tmp_path, plain, registry, device, native):
    """e4m3 has two encodings: a device of the other one does not compute in it."""
    giant.write(tmp_path, *giant.scrambled(1, layers=2, experts=4))
    fit = make_fit(source(tmp_path), trust=False, device=device, settings=plain, registry=registry)
    assert {f.name: f.native for f in fit.formats} == {"fp8": native, "BF16": True}


def test_an_op_that_nobody_knows(giant, tmp_path, plain, registry):
    giant.write(tmp_path, *giant.scrambled(1, layers=2, experts=4))
    few = Registry({n: o for n, o in registry.ops.items() if n != "router"}, {}, {})
    fit = make_fit(source(tmp_path), trust=False, device="H200", settings=plain, registry=few)
    ops = {o.op: o.prefill for o in fit.ops}
    assert ops["router"] == "none, because dz has no op for router; upstream's code would have to run"
    assert ops["linear"] == "reference (slow, exact)"


def test_formats_that_contradict_the_configuration(giant, tmp_path, plain, registry):
    config, shards = giant.scrambled(2, layers=2, experts=4)
    giant.write(tmp_path, {**config, "quantization_config": {"quant_method": "awq"}}, shards)
    with pytest.raises(Refused) as e:
        make_fit(source(tmp_path), trust=False, device="H200", settings=plain, registry=registry)
    assert e.value.code == "format_conflict"


def test_headers_alone_are_enough(giant, tmp_path, plain, registry):
    """What `dz fetch --metadata` keeps: configuration, index, and of the weight files the first bytes."""
    total = giant.write(tmp_path / "all", *giant.scrambled(4, layers=2, experts=2))
    whole = source(tmp_path / "all")
    (tmp_path / "headers").mkdir()
    for f in whole.files:
        if f.path.endswith(".safetensors"):
            with (tmp_path / "all" / f.path).open("rb") as file:
                first = file.read(8)
                kept = first + file.read(int.from_bytes(first, "little"))
            (tmp_path / "headers" / f"{f.path}.header").write_bytes(kept)
            (tmp_path / "all" / f.path).unlink()
    fit = make_fit(
        replace(whole, headers=str(tmp_path / "headers")), trust=False, device="H200", settings=plain, registry=registry
    )
    assert (fit.known_from, fit.bytes, fit.unaccounted) == ("headers", total, 0)


def test_an_unknown_device(tmp_path, plain, registry):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    with pytest.raises(UsageError, match="H300"):
        make_fit(source(tmp_path), trust=False, device="H300", settings=plain, registry=registry)


def test_windows_that_dz_keeps_whole_are_said(tmp_path, plain, registry):
    more = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128}
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, **more}))
    fit = make_fit(source(tmp_path), trust=False, device="H200", settings=plain, registry=registry)
    token = 2 * 4 * 2 * 64 * 2
    assert fit.per_token == token and fit.per_sequence == 128 * token
    assert any(f"keeps them whole, {token:,} B a token more" in n for n in fit.notes)


def test_streams_are_not_snapshots(tmp_path, plain, registry):
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "hc_mult": 4}))
    fit = make_fit(source(tmp_path), trust=False, device="H200", settings=plain, registry=registry)
    ops = {o.op for o in fit.ops}
    assert "residual_mix" not in ops and any("hyper" in o for o in ops)


def test_a_configuration_that_headers_contradict_is_noted(giant, tmp_path, plain, registry):
    config, shards = giant.scrambled(3, layers=4, experts=4)
    giant.write(tmp_path, {**config, "num_hidden_layers": 9, "layer_types": None}, shards)
    fit = make_fit(source(tmp_path), trust=False, device="H200", settings=plain, registry=registry)
    assert any("9 layers, headers hold 4" in n for n in fit.notes)


def test_a_class_is_read_where_it_may_run(giant, tmp_path, plain, registry):
    """Two layers of each kind and eight experts: the small model has what the whole one has, and the counts are its."""
    giant.write(tmp_path, *giant.trillion(layers=9, experts=40))
    giant.with_code(tmp_path)
    plainly = make_fit(source(tmp_path), trust=False, device="H200x8", settings=plain, registry=registry)
    assert plainly.known_from == "headers"
    fit = make_fit(source(tmp_path), trust=True, device="H200x8", settings=plain, registry=registry)
    assert fit.known_from == "headers and class" and fit.unaccounted == 0
    assert any(n.startswith("4 of 9 layers were built, 17 of 40 experts") for n in fit.notes)
    ops = {o.op: o for o in fit.ops}
    assert ops["router"].count == 8 and ops["Latent"].count == 3 and ops["Delta"].count == 6
    assert ops["Gated"].count == 1 + 8 * 41 and ops["Gated"].prefill.startswith("none, because")
    assert [(r.format, r.bytes) for r in fit.rows if r.split == "experts"] == [
        (r.format, r.bytes) for r in plainly.rows if r.split == "experts"
    ]
    assert "not held by the class" not in {r.op for r in fit.rows}


def test_a_tensor_that_the_class_does_not_hold(giant, tmp_path, plain, registry):
    config, shards = giant.trillion(layers=2, experts=20)
    shards[1]["language_model.model.layers.0.self_attn.stray.weight"] = ("BF16", (3, 5))
    giant.write(tmp_path, config, shards)
    giant.with_code(tmp_path)
    fit = make_fit(source(tmp_path), trust=True, device="H200x8", settings=plain, registry=registry)
    (row,) = (r for r in fit.rows if r.op == "not held by the class")
    assert row.bytes == 30 and any("unexpected: language_model" in n for n in fit.notes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("heads", [9, 14, 15, 16])
def test_there_is_a_split_for_every_number_of_heads(count, heads):
    shape = outline({**DENSE, "num_attention_heads": heads, "num_key_value_heads": heads})
    found = list(widths(shape, count))
    assert found and all(count % n == 0 and heads % n == 0 for n in found)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_numbers_without_bounds_are_no_sizes(value):
    assert outline({**DENSE, "num_key_value_heads": value}).layers


def test_more_layers_than_any_model_has_are_a_mistake():
    with pytest.raises(Refused, match="1,000,000,000 layers"):
        outline({**DENSE, "num_hidden_layers": 10**9})


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers"])
@pytest.mark.parametrize("value", [-64, 0, "64", float("nan"), True, 1.5])
def test_sizes_that_are_none_are_refused(name, value):
    with pytest.raises(Refused, match=name):
        outline({**DENSE, name: value})
