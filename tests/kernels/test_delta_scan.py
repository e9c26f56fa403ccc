"""Long sequences cut into pieces: what the contract's short cases do not reach by themselves."""

import sys

import pytest

from dz.core.registry import Registry
from dz.verify.contract import check_case

REGISTRY = Registry.discover()
SPLIT = [k for k in REGISTRY.kernels.values() if k.technique == "chunked" and k.op in ("kda", "gated_delta_rule")]


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("kernel", SPLIT, ids=lambda k: k.key)
def test_pieces_of_a_sequence_give_what_the_whole_gives(kernel, pieces):
    tune = sys.modules[kernel.run.__module__].TUNE
    op = REGISTRY.ops[kernel.op]
    cases = [c for c in op.inputs("bfloat16", "cpu", 0) if c.args["q"].shape[1] > 64 or c.id.startswith("t0")]
    assert len(cases) >= 3
    with tune.override({"pieces": pieces, "rows": 16, "own_rows": 16}):
        outcomes = [check_case(op, kernel, case, "bfloat16") for case in cases]
    assert [o for o in outcomes if not o.ok] == []
