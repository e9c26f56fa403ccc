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


def test_a_shape_that_no_recipe_names_is_told(capsys):
    from dz.cli.main import main

    assert main(["bench", "ops", "rms_norm", "--only", "no_such", "--device", "cpu"]) == 2
    assert "no_such" in capsys.readouterr().err


def test_documents_of_compare_and_tune(tmp_path, capsys, monkeypatch):
    from dz.cli.main import main

    old = tmp_path / "old.json"
    assert main(["bench", "ops", "rms_norm", "--tiny", "--device", "cpu", "--json", "--output", str(old)]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", str(old), str(old), "--json"]) == 0
    validate(json.loads(capsys.readouterr().out))
    assert main(["bench", "tune", "rms_norm/triton", "--device", "cpu"]) == 2  # it lists no configurations
    assert main(["bench", "tune", "residual_mix/triton", "--device", "cpu", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    validate(printed)
    assert printed["data"]["trials"]


def test_only_what_was_tried_is_kept(tmp_path, monkeypatch):
    from dz.bench import tune
    from dz.errors import UsageError

    monkeypatch.setattr(tune, "folder", lambda kind: tmp_path)
    (tmp_path / "op").mkdir()
    slow, fast = (
        tune.Trial(kernel="op/fast", bucket="few", shape="s", config={"warps": w}, median_us=u)
        for w, u in ((4, 9.0), (8, 5.0))
    )
    for choose in ({"many": "s"}, {"few": "t"}, {"few": ""}):
        with pytest.raises(UsageError, match="nothing to keep"):
            tune.keep([slow, fast], "card", choose)
    with pytest.raises(UsageError, match="nothing to keep"):
        tune.keep([], "card", {})
    kept = json.loads(tune.keep([slow, fast], "card", {"few": "s"}).read_text())
    assert kept == {"card": {"fast": {"few": {"warps": 8}}}}


@pytest.mark.parametrize(("moved", "work", "want"), [(2e9, 1e9, "memory"), (1e6, 1e12, "bfloat16")])
def test_the_floor_is_the_larger_of_bytes_and_operations(moved, work, want):
    best = Ceilings(bandwidth=1e12, flops={"bfloat16": 1e14}, empty_us=1.0)
    low, bound = floor(Cost(bytes=int(moved), flops={"bfloat16": int(work)}), best)
    assert bound == want
    assert low == pytest.approx(max(moved / 1e12, work / 1e14) * 1e6)
