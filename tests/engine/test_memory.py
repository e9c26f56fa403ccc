"""One memory plan: it adds up, keeps to its budget, and a refusal names the bytes that would do."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.engine.memory import UNSTATED, Needs, make
from dz.errors import Refused


def needs(weights=1000, per_token=10, per_sequence=0, activations=200):
    return Needs(
        weights=weights, per_token=per_token, per_sequence=per_sequence, activations=activations, measured="by hand"
    )


def plan(n, budget, *, asked_len=0, model_len=256, seqs=4, block_size=4, asked_blocks=0):
    return make(
        n,
        budget=budget,
        asked_len=asked_len,
        model_len=model_len,
        max_num_seqs=seqs,
        block_size=block_size,
        asked_blocks=asked_blocks,
    )


CASES = {
    "weights": st.integers(0, 5000),
    "per_token": st.integers(0, 40),
    "per_sequence": st.integers(0, 60),
    "activations": st.integers(0, 500),
}


@given(
    n=st.builds(needs, **CASES),
    budget=st.integers(0, 40000),
    asked_len=st.sampled_from([0, 2, 7, 64, 250]),
    model_len=st.sampled_from([0, 256, 1000]),
    seqs=st.integers(1, 9),
    block_size=st.integers(1, 17),
    asked_blocks=st.sampled_from([0, 0, 1, 5, 300]),
)
@settings(max_examples=400, deadline=None)
def test_it_adds_up_or_says_what_is_missing(n, budget, asked_len, model_len, seqs, block_size, asked_blocks):
    given_ = {"asked_len": asked_len, "model_len": model_len, "seqs": seqs, "block_size": block_size}
    given_["asked_blocks"] = asked_blocks
    try:
        made = plan(n, budget, **given_)
    except Refused as e:
        assert e.code == "no_memory"
        if "--num-blocks" in e.why:
            assert asked_blocks
            assert asked_blocks * block_size < max(asked_len, 2)
            return
        missing = int(re.search(r"([\d,]+) B are missing", e.why)[1].replace(",", ""))
        assert missing > 0, e.why
        plan(n, budget + missing, **given_)  # so many more are enough
        with pytest.raises(Refused):
            plan(n, budget + missing - 1, **given_)  # and not one less
        return
    assert sum(r.bytes for r in made.rows) == budget
    assert all(r.bytes >= 0 for r in made.rows)
    by_name = {r.name: r for r in made.rows}
    assert by_name["cache blocks"].bytes == made.blocks * block_size * n.per_token
    assert by_name["state slots"].bytes == made.slots * n.per_sequence
    assert made.slots == seqs
    assert 2 <= made.max_model_len <= made.blocks * block_size
    assert made.max_model_len <= (model_len or UNSTATED)
    if asked_len:
        assert made.max_model_len == asked_len
    if asked_blocks:
        assert made.blocks == asked_blocks


def test_no_more_blocks_than_can_be_used():
    made = plan(needs(), 10**9, asked_len=30, seqs=4)
    assert made.blocks == 30 * 4 // 4
    assert made.rows[-1].name == "left over"


def test_without_growing_state_the_pool_is_bookkeeping():
    made = plan(needs(per_token=0, per_sequence=100), 10**5, model_len=0)
    assert made.max_model_len == UNSTATED
    assert {r.name: r.bytes for r in made.rows}["cache blocks"] == 0


def test_the_context_shrinks_to_what_fits_unless_it_was_asked_for():
    made = plan(needs(), 1200 + 10 * 50)
    assert made.max_model_len == 48  # 12 blocks of 4
    with pytest.raises(Refused) as e:
        plan(needs(), 1200 + 10 * 50, asked_len=49)
    assert "49 tokens" in e.value.what
    assert "20 B are missing" in e.value.why  # 13 blocks are 520 B


@pytest.mark.parametrize("asked, word", [(257, "limit is 256"), (1, "at least 2")])
def test_lengths_that_make_no_sense(asked, word):
    with pytest.raises(Refused) as e:
        plan(needs(), 10**6, asked_len=asked)
    assert e.value.code == "too_long" if asked > 2 else "too_short"
    assert word in e.value.why


def test_too_few_blocks():
    with pytest.raises(Refused) as e:
        plan(needs(), 10**6, asked_len=100, asked_blocks=6)
    assert "--num-blocks 6" in e.value.why
    assert "24 tokens" in e.value.why
