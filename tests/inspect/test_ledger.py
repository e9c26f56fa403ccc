"""The ledger: every tensor once, by op, format and split, under any names."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.core.headers import BITS, TensorInfo
from dz.inspect.ledger import Structure, ledger
from dz.inspect.outline import outline
from dz.weights.families import recognise


def headers_of(shards):
    rows = {n: r for shard in shards for n, r in shard.items()}
    return {n: TensorInfo(n, d, s, 0, (prod(s) * BITS[d] + 7) // 8) for n, (d, s) in rows.items()}


def book(config, shards):
    headers = headers_of(shards)
    return ledger(headers, Structure(headers, recognise(headers, config), outline(config))), headers


def test_named_as_publishers_do(giant):
    config, shards = giant.trillion(layers=5, experts=6)
    found, headers = book(config, shards)
    rows = {(r.op, r.format): r for r in found.rows}
    assert found.unaccounted == 0 and sum(r.tensors for r in found.rows) == len(headers)
    assert rows["experts", "mxfp4"].tensors == 4 * 6 * 3 * 2
    assert rows["experts", "mxfp4"].values == 4 * 6 * 33_030_144
    assert rows["embedding", "BF16"].values == rows["lm_head", "BF16"].values == 163840 * 7168
    assert rows["router", "BF16"].tensors == rows["router", "F32"].tensors == 4
    assert rows["causal_conv", "BF16"].tensors == 3 * 3
    assert (found.layers, found.experts, found.layer_experts) == (5, 6, 6 * 33_030_144)
    assert found.packed_experts == found.layer_experts


@pytest.mark.parametrize("seed", range(4))
def test_random_names_and_sizes(giant, seed):
    config, shards = giant.scrambled(seed, layers=3, experts=5)
    found, headers = book(config, shards)
    by_format = {}
    for n, i in headers.items():
        name = "fp8" if "_scale_inv" in n or i.dtype == "F8_E4M3" else i.dtype
        by_format[name] = by_format.get(name, 0) + i.bytes
    assert {f: sum(r.bytes for r in found.rows if r.format == f) for f in by_format} == by_format
    assert found.unaccounted == 0
    ops = {r.op for r in found.rows}
    assert {"embedding", "lm_head", "experts", "router", "linear", "vector"} == ops
    routed = next(r for r in found.rows if r.op == "experts")
    assert routed.values == 3 * 5 * 3 * config["moe_intermediate_size"] * config["hidden_size"]


NAMES = st.lists(
    st.sampled_from(["a", "b", "0", "1", "7", "12", "weight", "norm", "x_3", "q.1"]), min_size=1, max_size=5
)
ROWS = st.dictionaries(
    NAMES.map(".".join),
    st.tuples(st.sampled_from(["BF16", "F32", "I64", "BOOL"]), st.lists(st.integers(0, 9), max_size=4).map(tuple)),
    max_size=20,
)


@settings(deadline=None)
@given(ROWS)
def test_any_names_and_shapes_add_up(rows):
    found, headers = book({"hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 9}, [rows])
    assert found.unaccounted == 0
    assert sum(r.tensors for r in found.rows) == len(headers)
    assert sum(r.values for r in found.rows) == sum(prod(i.shape) for i in headers.values())


def test_stacked_experts_are_experts():
    e, h, w = 6, 32, 16
    shards = [
        {
            f"m.layers.{i}.mlp.experts.{n}": ("BF16", s)
            for i in range(2)
            for n, s in (("gate_up_proj", (e, h, 2 * w)), ("down_proj", (e, w, h)), ("down_proj_bias", (e, h)))
        }
    ]
    config = {"hidden_size": h, "num_hidden_layers": 2, "num_local_experts": e, "moe_intermediate_size": w}
    found, _ = book(config, shards)
    assert {(r.op, r.split) for r in found.rows} == {("experts", "experts")}
    assert found.packed_experts == 0 and found.experts == e
