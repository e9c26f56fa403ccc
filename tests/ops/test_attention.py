"""The attention reference against PyTorch's, and each rule on its own."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dz.errors import UsageError
from dz.ops.attention import inputs, reference


def random(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3), groups=st.integers(1, 3), per=st.integers(1, 3), new=st.integers(1, 6),
    old=st.integers(0, 7), dim=st.integers(1, 9), dv=st.integers(1, 5), causal=st.booleans(),
    window=st.none() | st.integers(1, 8), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_equals_torch(batch, groups, per, new, old, dim, dv, causal, window, seed):
    total = old + new
    q, k, v = random(seed, (batch, groups * per, new, dim), (batch, groups, total, dim), (batch, groups, total, dv))
    at_q, at_k = torch.arange(old, total)[:, None], torch.arange(total)[None]
    mask = torch.ones(new, total, dtype=torch.bool)
    if causal:
        mask &= at_k <= at_q
    if window is not None:
        mask &= (at_k > at_q - window) & ((at_k < at_q + window) | causal)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.37, enable_gqa=True)
    got = reference(q, k, v, scale=0.37, causal=causal, window=window)
    torch.testing.assert_close(got, want.transpose(1, 2))
    masked = reference(q, k, v, scale=0.37, causal=False, mask=mask)
    torch.testing.assert_close(masked, got)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=5), st.integers(0, 2**31))
def test_packed_equals_one_by_one(lengths, seed):
    """Each segment: (new tokens, tokens before them); window, sinks and softcap throughout."""
    news, totals = [n for n, _ in lengths], [n + o for n, o in lengths]
    q, k, v = random(seed, (1, 4, sum(news), 8), (1, 2, sum(totals), 8), (1, 2, sum(totals), 6))
    (sinks,) = random(seed, (4,))
    rules = {"window": 3, "sinks": sinks, "softcap": 2.0}
    cu = [torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (news, totals)]
    got = reference(q, k, v, cu_q=cu[0], cu_k=cu[1], **rules)
    parts = [
        reference(a, b, c, **rules)
        for a, b, c in zip(q.split(news, 2), k.split(totals, 2), v.split(totals, 2), strict=True)
    ]
    torch.testing.assert_close(got, torch.cat(parts, 1))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2**31))
def test_ragged_batch_ignores_unused_rows(lengths, seed):
    longest = max(lengths)
    q, k, v = random(seed, (len(lengths), 4, 1, 8), (len(lengths), 2, longest, 8), (len(lengths), 2, longest, 8))
    want = torch.cat([reference(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n]) for i, n in enumerate(lengths)])
    for i, n in enumerate(lengths):
        k[i, :, n:], v[i, :, n:] = float("nan"), float("inf")
    torch.testing.assert_close(reference(q, k, v, kv_lengths=torch.tensor(lengths)), want)


def test_sinks_take_weight_and_give_nothing():
    q, k, v = random(0, (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    sinks = torch.tensor([0.7, -30.0], dtype=torch.float64)
    ones = reference(q, k, torch.ones_like(v), sinks=sinks)
    assert (ones[:, :, 0] < 0.99).all() and torch.allclose(ones[:, :, 1], torch.ones(3, 4, dtype=torch.float64))
    extra = torch.cat((torch.einsum("bhsd,bhtd->bhst", q, k) * 0.5, sinks.view(1, 2, 1, 1).expand(1, 2, 3, 1)), -1)
    extra[..., :3].masked_fill_(~torch.ones(3, 3).tril().bool(), float("-inf"))
    want = extra.softmax(-1)[..., :3] @ v
    torch.testing.assert_close(reference(q, k, v, sinks=sinks), want.transpose(1, 2))


def test_softcap_acts_before_the_mask_and_after_the_scale():
    q, k, v = random(1, (1, 1, 2, 4), (1, 1, 4, 4), (1, 1, 4, 4))
    scores = 3.0 * torch.tanh(torch.einsum("bhsd,bhtd->bhst", q, k) * 2.0 / 3.0)
    scores.masked_fill_(~torch.ones(2, 4).tril(2).bool(), float("-inf"))
    want = scores.softmax(-1) @ v
    torch.testing.assert_close(reference(q, k, v, scale=2.0, softcap=3.0), want.transpose(1, 2))


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = random(2, (1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    out = reference(q, k, v, q_offset=torch.tensor([-1]))
    assert not out[:, 0].any() and out[:, 1].any()
    assert not reference(q, k[:, :, :0], v[:, :, :0]).any()


def test_every_case_is_finite():
    for dtype in ("float32", "bfloat16"):
        for case in inputs(dtype, "cpu", 3):
            out = reference(**case.args)
            assert out.isfinite().all(), case.id
            assert out.dtype == case.args["q"].dtype


@pytest.mark.parametrize(
    "extra",
    [
        {"cu_q": torch.tensor([0, 2])},
        {"cu_q": torch.tensor([0, 2]), "cu_k": torch.tensor([0, 3]), "q_offset": 1},
        {"cu_q": torch.tensor([0, 1]), "cu_k": torch.tensor([0, 3])},
    ],
)
def test_contradicting_arguments_are_refused(extra):
    with pytest.raises(UsageError):
        reference(*random(0, (1, 2, 2, 4), (1, 2, 3, 4), (1, 2, 3, 4)), **extra)


def test_heads_must_divide():
    with pytest.raises(UsageError, match="3 query heads"):
        reference(*random(0, (1, 3, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)))
