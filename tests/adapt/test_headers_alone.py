"""A plan from headers alone: the same sites and totals as with the weights, and nothing proved."""

from dataclasses import replace

import pytest

from dz import adapt
from dz.settings import resolve


@pytest.fixture
def both(tiny, tmp_path):
    """(a source with weights, the same source of which only the header is here), and the arguments of a plan."""
    whole = tiny.source(tiny.write(tmp_path / "m", tiny.LLAMA))
    file = next(f for f in whole.files if f.path.endswith(".safetensors"))
    raw = (whole.path / file.path).read_bytes()
    kept = tmp_path / "headers" / f"{file.path}.header"
    kept.parent.mkdir()
    kept.write_bytes(raw[: 8 + int.from_bytes(raw[:8], "little")])
    bare = tmp_path / "bare"
    bare.mkdir()
    for f in whole.files:
        if f is not file:
            (bare / f.path).write_bytes((whole.path / f.path).read_bytes())
    settings = resolve({"workspace": str(tmp_path / "ws"), "device": "cpu"}, no_config=True, env={})
    where = {"trust": False, "device": "cpu", "settings": settings}
    return whole, replace(whole, folder=str(bare), headers=str(kept.parent)), where


def test_sites_and_totals_are_those_of_the_whole_model(both):
    whole, headers, where = both
    inventory, plan = adapt.make_plan(headers, **where)
    expected, proved = adapt.make_plan(whole, **where)
    assert inventory == expected
    assert inventory.coverage.complete and inventory.bytes and inventory.files == expected.files
    assert [s.site for s in plan.sites] == [s.site for s in proved.sites]
    assert not any(c.verified for s in plan.sites for c in s.phases.values())
    assert any(c.verified for s in proved.sites for c in s.phases.values())
    assert plan.inputs["verified on the device"] == "no"
