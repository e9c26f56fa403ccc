"""A repository of 2.78 T parameters in half a million tensors, and one of random names and sizes: read from headers and
configuration, and through a trusted class, by the command itself, in bounded time and memory.

The repositories are sparse files with real headers. Time is the process's own (user and system), so that a busy machine
does not fail it."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dz.adapt.fit.splits import Budget, splits
from dz.backends import profile
from dz.core.envelope import validate
from dz.inspect.ledger import Ledger, Row
from dz.inspect.outline import outline

SECONDS, MEMORY = 30, 3 * 10**9
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def adapt(folder, workspace, *flags):
    """`run` of `dz adapt --dry-run --device H200x16`."""
    return run(workspace, "adapt", str(folder), "--dry-run", "--device", "H200x16", *flags)


def run(workspace, *words):
    """(document, seconds of processor, peak bytes, exit code) of a dz command."""
    command = [sys.executable, "-m", "dz", *words, "--json"]
    env = {**os.environ, "DZ_WORKSPACE": str(workspace), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, env=env, cwd=workspace)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        document = json.loads(out.read())
    return document, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, process.returncode


@pytest.fixture(scope="module")
def trillion(giant, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trillion") / "model"
    config, shards = giant.trillion()
    total = giant.write(folder, config, shards)
    giant.with_code(folder)
    sums = {}
    for name, (dtype, shape) in (t for s in shards for t in s.items()):
        format_ = "mxfp4" if ".experts." in name else dtype
        op = (
            "experts"
            if ".experts." in name
            else "embedding"
            if "embed" in name
            else "lm_head"
            if "lm_head" in name
            else ""
        )
        op = op or ("router" if ".gate." in name else "causal_conv" if "conv1d" in name else "rest")
        row = sums.setdefault((op, format_), [0, 0])
        row[0] += 1
        row[1] += giant.size_of(dtype, shape)
    return folder, total, sums


def as_summed(rows):
    out = {}
    for r in rows:
        op = r["op"] if r["op"] in ("experts", "embedding", "lm_head", "router", "causal_conv") else "rest"
        row = out.setdefault((op, r["format"]), [0, 0])
        row[0] += r["tensors"]
        row[1] += r["bytes"]
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="module")
def plainly(trillion, base):
    return adapt(trillion[0], base)


def test_its_size(trillion):
    folder, total, sums = trillion
    assert total == pytest.approx(1.56e12, rel=0.002)
    assert sum(n for n, _ in sums.values()) > 490_000
    assert sum(f.stat().st_blocks * 512 for f in folder.iterdir()) < 200e6


@pytest.mark.parametrize("trusted", [False, True], ids=["without a class", "through a trusted class"])
def test_in_bounded_time_and_memory_nothing_unaccounted(trillion, plainly, base, trusted):
    folder, total, sums = trillion
    if trusted:  # code of a folder runs only once it is registered
        assert run(base, "fetch", str(folder))[3] == 0
    document, seconds, memory, code = adapt(folder, base, "--trust-remote-code") if trusted else plainly
    validate(document)
    data = document["data"]
    assert data["known_from"] == ("headers and class" if trusted else "headers")
    assert (data["bytes"], data["unaccounted"], code) == (total, 0, 0)
    assert as_summed(data["rows"]) == sums
    assert data["layers"] == 93 and data["parameters"] == pytest.approx(2.78e12, rel=0.002)
    assert seconds < SECONDS and memory < MEMORY
    if trusted:
        assert any(n.startswith("4 of 93 layers were built, 17 of 896 experts in each") for n in data["notes"])
        ops = {o["op"]: o["count"] for o in data["ops"]}
        assert (ops["Delta"], ops["Latent"], ops["router"], ops["Gated"]) == (69, 24, 92, 1 + 92 * 897)


# GPUs, split: bytes in GB on each: experts, dense, left of 150.8, FP8 workspace of one layer
TABLE = [
    (8, "EP8 TP8", 180.8, 14.2, -44.2, 3.70),
    (16, "EP16 TP16", 90.4, 7.1, 53.3, 1.85),
    (16, "EP16 TP4 x DP4", 90.4, 28.4, 32.0, 1.85),
    (32, "EP32 TP8 x DP4", 45.2, 14.2, 91.4, 0.925),
]


@pytest.mark.parametrize(("count", "name", "experts", "dense", "left", "workspace"), TABLE)
def test_the_table_of_the_largest_shape(plainly, giant, count, name, experts, dense, left, workspace):
    data = plainly[0]["data"]
    rows = tuple(Row(**{**r, "where": tuple(r["where"])}) for r in data["rows"])
    packed = data["splits"][0]["workspace"] * 16
    book = Ledger(
        rows=rows, tensors=0, total=data["bytes"], layers=93, experts=896, layer_experts=packed, packed_experts=packed
    )
    budget = Budget(share=0.9, tokens=2048, sequences=16, itemsize=2, converted=1)
    found = {s.name: s for s in splits(book, outline(giant.trillion_config()), profile(f"H200x{count}"), budget)}
    row = found[name]
    got = [x / 1e9 for x in (row.experts, row.dense, row.left, row.workspace)]
    assert got == pytest.approx([experts, dense, left, workspace], rel=0.02)
    assert row.fits is (count > 8)
    if count == 16:
        assert row.experts_fp8 + row.dense > profile("H200").memory  # held as FP8 they do not fit
    if count == 32:
        assert (row.experts_fp8 + row.dense) / 1e9 == pytest.approx(99.3, rel=0.02)
    assert row.whole_matrices < 1.2e9
    assert name not in {s["name"]: s for s in data["splits"]} or count == 16


def test_one_sequence_of_a_million_tokens(plainly):
    data = plainly[0]["data"]
    assert data["per_token"] * 2**20 / 1e9 == pytest.approx(29.0, rel=0.02)
    kinds = {c["kind"]: c for c in data["cache"]}
    assert kinds["recurrent state"]["per_sequence"] / 1e6 == pytest.approx(434, rel=0.02)
    assert kinds["convolution"]["per_sequence"] / 1e6 == pytest.approx(15, rel=0.03)
    assert kinds["latent"]["layers"] == 24 and kinds["recurrent state"]["layers"] == 69


def test_for_every_op_a_kernel_the_reference_or_none(plainly):
    for op in plainly[0]["data"]["ops"]:
        for phase in ("prefill", "decode"):
            assert re.match(r"\w+/\w+|reference \(slow, exact\)$|none, because \w+", op[phase]), op


@pytest.mark.parametrize("trusted", [False, True], ids=["without a class", "through a trusted class"])
def test_random_names_and_sizes(giant, tmp_path, trusted):
    folder, seed = tmp_path / "model", 11
    config, shards = giant.scrambled(seed, layers=24, experts=96)
    total = giant.write(folder, config, shards)
    giant.scrambled_code(folder, seed)
    sums = {}
    for name, (dtype, shape) in (t for s in shards for t in s.items()):
        format_ = "fp8" if dtype == "F8_E4M3" or name.endswith("_inv") else dtype
        sums[format_] = sums.get(format_, 0) + giant.size_of(dtype, shape)
    (tmp_path / "ws").mkdir()
    if trusted:
        assert run(tmp_path / "ws", "fetch", str(folder))[3] == 0
    document, seconds, memory, _ = adapt(folder, tmp_path / "ws", *["--trust-remote-code"] * trusted)
    validate(document)
    data = document["data"]
    assert (data["bytes"], data["unaccounted"]) == (total, 0)
    assert {f["name"]: f["bytes"] for f in data["formats"]} == sums
    plainly = {"embedding", "lm_head", "experts", "router", "linear", "vector"}  # told apart by shapes alone
    by_class = {"embedding", "experts", "linear", "rms_norm"}  # router and head are linear maps to the class
    assert {r["op"] for r in data["rows"]} == (by_class if trusted else plainly)
    assert data["per_token"] == 24 * 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    assert seconds < SECONDS and memory < MEMORY
    if trusted:
        assert any(n.startswith("1 of 24 layers were built, 9 of 96 experts in each") for n in data["notes"])
