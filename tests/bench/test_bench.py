"""The bench on a CPU with its smallest shapes: every op with a workload is measured, compared and told apart."""

import json

import pytest

from dz.bench.ceilings import Ceilings, floor
from dz.bench.workload import Cost
from dz.core.envelope import validate


def test_tiny_run_measures_every_workload(tmp_path, capsys):
    from dz.cli.main import main

    target = tmp_path / "bench.json"
    assert main(["bench", "ops", "--tiny", "--device", "cpu", "--json", "--output", str(target)]) == 0
    printed = json.loads(capsys.readouterr().out)
    validate(printed)
    assert printed["data"]["rows"] == json.loads(target.read_text())["data"]["rows"]
    by_op = {r["op"] for r in printed["data"]["rows"]}
    assert {"rms_norm", "gated_activation", "mxfp4_to_fp8", "index_topk", "block_sparse_attention"} <= by_op
    for row in printed["data"]["rows"]:
        assert row["status"] == "measured" or row["reason"], row


def test_a_kernel_that_is_refused_says_why(capsys):
    from dz.cli.main import main

    assert main(["bench", "ops", "mxfp4_to_fp8", "--tiny", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["data"]["rows"]
    refused = [r for r in rows if r["impl"] == "mxfp4_to_fp8/triton"]
    assert refused and "cuda" in refused[0]["reason"]


def test_unknown_op_suggests_the_nearest(capsys):
    from dz.cli.main import main

    assert main(["bench", "ops", "rms_nrom", "--tiny", "--device", "cpu"]) == 2
    assert "rms_norm" in capsys.readouterr().err


@pytest.mark.parametrize(("moved", "work", "want"), [(2e9, 1e9, "memory"), (1e6, 1e12, "bfloat16")])
def test_the_floor_is_the_larger_of_bytes_and_operations(moved, work, want):
    best = Ceilings(bandwidth=1e12, flops={"bfloat16": 1e14}, empty_us=1.0)
    low, bound = floor(Cost(bytes=int(moved), flops={"bfloat16": int(work)}), best)
    assert bound == want
    assert low == pytest.approx(max(moved / 1e12, work / 1e14) * 1e6)
