"""A model that looks ahead is found out, also when it does so rarely; a probe that changes nothing is no proof."""

import pytest
import torch

from dz.verify.causality import altered, compare, probe

VOCAB, WIDTH = 23, 16
TABLE = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0))
HEAD = torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(1))
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def causal(tokens):
    """Means over the prefix: [T, V]."""
    x = TABLE[tokens].cumsum(0) / torch.arange(1, len(tokens) + 1)[:, None]
    return x @ HEAD


def ahead_by_one(tokens):
    x = TABLE[tokens].roll(-1, 0)
    x[-1] = 0
    return causal(tokens) + 0.01 * (x @ HEAD)


def blocks_of_four(tokens):
    """A compressed index that sees to the end of its block: leaks only inside a block."""
    out = causal(tokens)
    for i in range(0, len(tokens), 4):
        out[i : i + 4] += 0.1 * (TABLE[tokens[i : i + 4]].mean(0) @ HEAD)
    return out


def test_a_causal_model_passes():
    found = probe(causal, TOKENS, vocab=VOCAB)
    assert found.causal and found.max_change <= 1e-5 and found.behind > 0.1


def test_r13_one_token_ahead():
    found = probe(ahead_by_one, TOKENS, vocab=VOCAB, cut=6)
    assert not found.causal and found.at == 6 and "position 6" in found.reason


@pytest.mark.parametrize(("cut", "seen"), [(5, True), (7, False)])
def test_r13_a_leak_inside_a_block_is_seen_from_inside_the_block(cut, seen):
    assert probe(blocks_of_four, TOKENS, vocab=VOCAB, cut=cut).causal is not seen


def test_rounding_is_no_leak_and_nan_is():
    a = torch.randn(6, 5)
    b = a.clone()
    b[4:] += 1
    assert compare(a, b + torch.tensor(1e-5), 3).causal
    b[1, 2] = torch.nan
    assert not compare(a, b, 3).causal


def test_a_blind_probe_proves_nothing():
    found = probe(lambda t: torch.zeros(len(t), VOCAB), TOKENS, vocab=VOCAB)
    assert not found.causal and "blind" in found.reason


def test_altered_changes_every_later_token_and_no_earlier_one():
    for cut in range(len(TOKENS) - 1):
        new = altered(TOKENS, cut, VOCAB)
        assert new[: cut + 1] == TOKENS[: cut + 1]
        assert all(a != b for a, b in zip(new[cut + 1 :], TOKENS[cut + 1 :], strict=True))
    assert altered([5, 5, 5, 5], 1, 6) == [5, 5, 0, 0]
    with pytest.raises(ValueError, match="nothing to change"):
        altered([1, 2], 1, 9)
