"""Selective scans, hyper-connections, patches and plain feed-forwards against another way to compute them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dz.core.inventory import SiteView
from dz.core.registry import Registry
from dz.errors import UsageError
from dz.ops import (
    feed_forward,
    hyper_collapse,
    hyper_connection,
    mamba2_scan,
    mamba_scan,
    mtp_join,
    padding_mask,
    patch_embed,
)

OPS = (feed_forward, hyper_collapse, hyper_connection, mamba2_scan, mamba_scan, mtp_join, padding_mask, patch_embed)


def cases(op, dtype="float32"):
    return list(op.inputs(dtype, "cpu", 0))


def site(target, kind="module"):
    return SiteView(kind=kind, fqn="x", target=target, source="", config=None)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("op", OPS, ids=lambda o: o.OP.name)
def test_cases_run_in_every_dtype_and_leave_their_arguments(op):
    assert len(cases(op)) >= 6
    for dtype in ("float32", "float16", "bfloat16"):
        for case in cases(op, dtype):
            kept = {k: v.clone() for k, v in case.args.items() if torch.is_tensor(v)}
            for out in parts(op.reference(**case.args)):
                assert torch.isfinite(out).all(), case.id
            assert all(torch.equal(case.args[k], v) for k, v in kept.items()), case.id


@pytest.mark.parametrize("op", (mamba2_scan, mamba_scan), ids=lambda o: o.OP.name)
def test_a_scan_in_two_parts_is_the_scan(op):
    """The state after a part is all that the next part needs; packed sequences are as each alone."""
    time = 1 if op is mamba2_scan else 2
    args = dict(next(c for c in cases(op) if c.id.startswith("t33")).args)
    whole, last = op.reference(**args)
    tokens = [k for k in ("x", "dt", "B", "C") if k in args]

    def cut(low, high):
        return {**args, **{k: args[k].narrow(time, low, high - low) for k in tokens}}

    first, state = op.reference(**cut(0, 13))
    second, end = op.reference(**cut(13, 33), state=state)
    torch.testing.assert_close(torch.cat((first, second), time), whole)
    torch.testing.assert_close(end, last)
    packed, states = op.reference(**args, cu_seqlens=torch.tensor([0, 13, 13, 33]))
    torch.testing.assert_close(packed.narrow(time, 0, 13), first)
    torch.testing.assert_close(packed.narrow(time, 13, 20), op.reference(**cut(13, 33))[0])
    assert torch.equal(states[1], torch.zeros_like(states[1]))
    with pytest.raises(UsageError):
        doubled = {k: torch.cat((v, v)) if k in tokens else v for k, v in args.items()}
        op.reference(**doubled, cu_seqlens=torch.tensor([0, 33]))


def test_mamba2_is_attention_with_a_decaying_mask():
    """arXiv:2405.21060, the quadratic form: y = (C B^T * exp(sums of dt A)) (dt x)."""
    x, dt, b, c = (
        normal(1, 9, 2, 4),
        normal(1, 9, 2, seed=1).abs(),
        normal(1, 9, 1, 3, seed=2),
        normal(1, 9, 1, 3, seed=3),
    )
    a = -normal(2, seed=4).abs()
    got, _ = mamba2_scan.reference(x, dt, a, b, c, dt_softplus=False)
    sums = (dt[0] * a).cumsum(0)
    for h in range(2):
        decay = torch.exp(sums[:, None, h] - sums[None, :, h]).tril()
        want = (c[0, :, 0] @ b[0, :, 0].T * decay) @ (dt[0, :, h, None] * x[0, :, h])
        torch.testing.assert_close(got[0, :, h], want)


def test_mamba1_of_one_state_is_mamba2_of_heads_of_one_channel():
    x, dt, b, c = normal(2, 5, 8), normal(2, 5, 8, seed=1), normal(2, 1, 8, seed=2), normal(2, 1, 8, seed=3)
    a = -normal(5, 1, seed=4).abs()
    one, _ = mamba_scan.reference(x, dt, a, b, c)
    heads = x.transpose(1, 2)[..., None], dt.transpose(1, 2), a[:, 0]
    two, _ = mamba2_scan.reference(*heads, b.transpose(1, 2)[:, :, None], c.transpose(1, 2)[:, :, None])
    torch.testing.assert_close(one, two[..., 0].transpose(1, 2))


def test_mixing_of_streams_is_doubly_stochastic():
    args = cases(hyper_connection)[0].args
    post, comb, collapsed = hyper_connection.reference(**{**args, "iterations": 60})
    ones = torch.ones(comb.shape[:-1])
    torch.testing.assert_close(comb.sum(-1), ones, atol=1e-3, rtol=0)
    torch.testing.assert_close(comb.sum(-2), ones, atol=1e-5, rtol=0)
    assert (post > 0).all()
    assert (post < 2).all()
    # with a projection of nothing every stream counts the same
    plain = {**args, "fn": torch.zeros_like(args["fn"]), "base": torch.zeros_like(args["base"])}
    torch.testing.assert_close(hyper_connection.reference(**plain)[2], args["streams"].sum(-2) * (0.5 + 1e-6))
    single = plain | {
        "fn": plain["fn"][:4],
        "base": plain["base"][:4],
        "scale": args["scale"][:1],
    }
    torch.testing.assert_close(hyper_collapse.reference(**single), args["streams"].sum(-2) * (0.5 + 1e-6))
    del collapsed


def test_patches_are_a_strided_convolution():
    for case in cases(patch_embed):
        x, w = case.args["x"], case.args["weight"]
        if 0 in x.shape or any(s < p for s, p in zip(x.shape[2:], w.shape[2:], strict=True)):
            assert patch_embed.reference(**case.args).numel() == 0
            continue
        conv = F.conv2d if w.dim() == 4 else F.conv3d
        torch.testing.assert_close(
            patch_embed.reference(**case.args),
            conv(x, w, case.args.get("bias"), stride=w.shape[2:]),
            atol=1e-5,
            rtol=1e-5,
        )
    with pytest.raises(UsageError, match="patches of shape"):
        patch_embed.reference(torch.zeros(1, 2, 4, 4), torch.zeros(5, 3, 2, 2))


def test_patches_are_recognised():
    found = patch_embed.recognise(site(nn.Conv2d(3, 8, 4, 4)))
    assert (found.status, found.traits["patch"]) == ("known", [4, 4])
    assert [a.name for a in found.binding.args] == ["x", "weight", "bias"]
    assert patch_embed.recognise(site(nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False))).status == "known"
    assert patch_embed.recognise(site(nn.Conv2d(3, 8, 7, 4))).differs == ("patches [7, 7] every [4, 4]",)
    assert patch_embed.recognise(site(nn.Conv2d(3, 8, 4, 4, padding=1))).status == "variant"
    assert patch_embed.recognise(site(nn.Conv2d(8, 8, 4, 4, groups=8))).status == "variant"
    assert patch_embed.recognise(site(nn.Linear(4, 4))) is None


class Quick(nn.Module):
    """x * sigmoid(1.702 x)."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Plain(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, act):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(6, 10), nn.Linear(10, 6), act

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Normed(Plain):
    """With a norm before."""

    def forward(self, x):
        return self.down(self.act(self.up(x - x.mean(-1, keepdim=True))))


def test_plain_feed_forwards_are_recognised():
    for act, name in ((nn.GELU(), "gelu"), (nn.SiLU(), "silu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.ReLU(), "relu")):
        module = Plain(act)
        found = feed_forward.recognise(site(module))
        assert (found.status, found.traits) == ("known", {"activation": name, "alpha": 1.0})
        assert (found.binding.then, found.binding.args[0].path) == ("down", "up")
        x = torch.randn(3, 6)
        torch.testing.assert_close(module(x), module.down(feed_forward.reference(module.up(x), activation=name)))
    assert feed_forward.recognise(site(Normed(nn.GELU()))).status == "variant"
    quick = feed_forward.recognise(site(Plain(Quick())))
    assert (quick.status, quick.traits["alpha"]) == ("known", 1.702)
    with pytest.raises(UsageError, match="alpha 2 of the activation gelu"):
        feed_forward.reference(x, activation="gelu", alpha=2.0)
    assert feed_forward.recognise(site(nn.Linear(3, 3))) is None


def test_upstreams_scans_and_streams_are_recognised():
    from transformers.models.mamba import modeling_mamba as one
    from transformers.models.mamba2 import modeling_mamba2 as two

    known = {
        mamba2_scan: (two.mamba2_chunk_scan, two.mamba2_selective_state_update),
        mamba_scan: (one.mamba_selective_scan, one.mamba_selective_state_update),
    }
    for op, (whole, step) in known.items():
        assert op.recognise(site(whole, "function")).status == "known"
        assert op.recognise(site(step, "function")).differs == ("it moves its state on in place",)
        others = [f for o, fs in known.items() if o is not op for f in fs]
        assert [op.recognise(site(f, "function")) for f in others] == [None, None]


class Streams(nn.Module):
    """A hyper-connection in other words than the op's, with names of its own."""

    def __init__(self, *, twice=2.0):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.empty(s, device="meta")) for s in ((24, 40), (24,), (3,)))
        self.rounds, self.tiny, self.twice = 7, 1e-5, twice

    def forward(self, x):
        v = x.flatten(2).float()
        v = v / torch.sqrt((v * v).mean(-1, keepdim=True) + self.tiny)
        y = v @ self.a.T
        pre, post, mix = y.split([4, 4, 16], -1)
        pre = torch.sigmoid(pre * self.c[0] + self.b[:4]) + self.tiny
        post = self.twice * torch.sigmoid(post * self.c[1] + self.b[4:8])
        mix = torch.softmax((mix * self.c[2] + self.b[8:]).view(*mix.shape[:-1], 4, 4), -1) + self.tiny
        for i in range(self.rounds):
            if i:
                mix = mix / (mix.sum(3, keepdim=True) + self.tiny)
            mix = mix / (mix.sum(2, keepdim=True) + self.tiny)
        return torch.einsum("bsn,bsnd->bsd", pre, x.float()).to(x.dtype), post, mix


def test_streams_are_recognised_by_their_numbers():
    found = hyper_connection.recognise(site(Streams()))
    assert found.status == "known"
    assert found.traits == {"streams": 4, "iterations": 7, "eps": 1e-5, "norm_eps": 1e-5}
    other = hyper_connection.recognise(site(Streams(twice=1.0)))
    assert (other.status, other.differs) == (
        "variant",
        ("its parameters have the op's shapes, its numbers are others",),
    )
    assert hyper_connection.recognise(site(nn.Linear(4, 4))) is None
    assert hyper_collapse.recognise(site(Streams())) is None


class Head(nn.Module):
    """The entry of an MTP head."""

    def __init__(self, norm):
        super().__init__()
        self.enorm, self.hnorm, self.eh_proj = norm(8), norm(8), nn.Linear(16, 8, bias=False)

    def forward(self, embeds, hidden):
        return self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))


class Longer(Head):
    """With something after it."""

    def forward(self, embeds, hidden):
        return torch.tanh(self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1)))


def test_the_entry_of_an_mtp_head_is_recognised():
    head = Head(nn.RMSNorm)
    found = mtp_join.recognise(site(Head(lambda d: nn.RMSNorm(d, eps=1e-6))))
    assert (found.status, found.traits) == ("known", {"norms": ["enorm", "hnorm"], "projection": "eh_proj"})
    assert mtp_join.recognise(site(Longer(lambda d: nn.RMSNorm(d, eps=1e-6)))).status == "variant"
    assert mtp_join.recognise(site(Head(lambda d: nn.Linear(d, d)))) is None
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    weights = head.enorm.weight, head.hnorm.weight, head.eh_proj.weight
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(mtp_join.reference(x, y, *weights, eps=eps), head(x, y))


def masked(x, mask=None):
    """The op in other words, as older releases have it: one sequence is left as it is."""
    left = mask is None or x.shape[0] == 1 or x.shape[1] == 1
    return x if left else torch.where(mask[..., None] == 1, x, 0.0)


def test_masking_of_padding_is_recognised():
    from transformers.models.mamba2 import modeling_mamba2 as two

    found = padding_mask.recognise(site(two.apply_mask_to_padding_states, "function"))
    assert (found.status, found.traits) == ("known", {"always": True})
    assert [a.path for a in found.binding.args[:2]] == ["hidden_states", "attention_mask"]
    assert padding_mask.recognise(site(masked, "function")).traits == {"always": False}
    assert padding_mask.recognise(site(two.segment_sum, "function")) is None
    assert padding_mask.recognise(site(lambda x, mask: x, "function")) is None


def test_they_are_registered():
    assert {o.OP.name for o in OPS} <= set(Registry.discover().ops)
