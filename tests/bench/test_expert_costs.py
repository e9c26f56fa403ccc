"""A bench document turned into the table of experts' costs."""

import pytest

from dz.bench.expert_costs import tabulate
from dz.errors import UsageError
from dz.ops.expert_cost import choose, parse


def row(op: str, us: float, **sizes: int) -> dict:
    return {"impl": f"{op}/triton", "status": "measured", "median_us": us, "sizes": sizes}


def document() -> dict:
    size = {"experts": 4, "n": 1000, "k": 1000}
    return {
        "data": {
            "rows": [
                row("mxfp4_to_fp8", 4.0, **size),
                row("grouped_gemm_mxfp4", 8.0, **size, rows=400),
                row("grouped_gemm_mxfp4", 2.0, **size, rows=1),
                row("grouped_gemm_fp8", 12.0, **size, rows=4000),
                row("grouped_gemm_fp8", 24.0, experts=4, n=2000, k=1000, rows=4000),
                {**row("grouped_gemm_fp8", 1.0, **size, rows=8), "status": "failed"},
                row("rms_norm", 1.0),
            ]
        }
    }


def test_times_become_picoseconds_a_weight():
    table = tabulate(document())
    assert table == {"registers": [[1.0, 2.0], [100.0, 2.0]], "folded": [[1000.0, 3.0]], "fold": 1.0}
    assert choose(rows=400, hit=4, weights=10**6, costs=parse(table)).registers_us == pytest.approx(8.0)


@pytest.mark.parametrize("lacking", ["mxfp4_to_fp8", "grouped_gemm_mxfp4", "grouped_gemm_fp8"])
def test_a_bench_without_one_of_them_is_refused(lacking):
    given = document()
    given["data"]["rows"] = [r for r in given["data"]["rows"] if not r["impl"].startswith(lacking)]
    with pytest.raises(UsageError, match="without"):
        tabulate(given)
