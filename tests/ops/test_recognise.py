"""Ops recognised by structure in modules that no published model has: near misses are told apart and described."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dz.core.inventory import SiteView
from dz.core.registry import Registry
from dz.ops.mxfp4_unpack import E2M1
from dz.verify.bound import Bound


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def ask(registry, op, target, kind="module", source=""):
    return registry.op(op).recognise(SiteView(kind=kind, fqn="m", target=target, source=source, config=None))


class Base(nn.Module):
    def __init__(self, width=12, eps=1e-3):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.small = eps


class Plain(Base):
    def forward(self, states):
        kind = states.dtype
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.small)
        return self.scale * wide.to(kind)


class Late(Base):
    def _core(self, z):
        return z / torch.sqrt((z * z).mean(dim=-1, keepdim=True) + self.small)

    def forward(self, z):
        return (self._core(z.to(torch.float32)) * self.scale.float()).type_as(z)


class OnePlus(Late):
    def forward(self, z):
        return (self._core(z.float()) * (1.0 + self.scale.float())).to(z.dtype)


class Fused(Base):
    def forward(self, x):
        return F.rms_norm(x, (12,), self.scale, self.small)


@pytest.mark.parametrize(
    ("cls", "offset", "cast_first"),
    [(Plain, 0.0, True), (Late, 0.0, False), (OnePlus, 1.0, False), (Fused, 0.0, False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_forms_are_known_and_their_bindings_give_upstreams_numbers(registry, cls, offset, cast_first, dtype):
    module = cls().to(dtype)
    found = ask(registry, "rms_norm", module)
    assert (found.status, found.traits["offset"], found.traits["cast_first"]) == ("known", offset, cast_first)
    assert found.traits["eps"] == 1e-3
    x = torch.randn(2, 5, 12, dtype=dtype) * 0.05  # small, so that eps matters
    bound = Bound(module, found.binding)
    got = bound.finish(registry.op("rms_norm").reference(**bound.arguments((x,), {})))
    assert got.dtype == module(x).dtype
    torch.testing.assert_close(got, module(x), atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6)


class Gated(Base):
    def forward(self, x, gate=None):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.small)
        return (self.scale * y.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


class GatedBefore(Base):
    def forward(self, x, gate):
        y = x.float() * F.silu(gate.float())
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.small)
        return self.scale * y.to(x.dtype)


class NoUpcast(Base):
    def forward(self, x):
        return self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.small)


class InverseOnly(Base):
    def forward(self, x):
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.small).to(x.dtype)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Gated, "multiplied by silu(gate) after the norm"),
        (GatedBefore, "multiplied by silu(gate) before the norm"),
        (NoUpcast, "input's dtype"),
        (InverseOnly, "1 / rms(x) alone"),
    ],
)
def test_near_norms_are_variants_with_the_difference(registry, cls, words):
    found = ask(registry, "rms_norm", cls())
    assert found.status == "variant"
    assert any(words in d for d in found.differs), found.differs
    assert found.binding is None


class MeanNorm(Base):
    def forward(self, x):
        y = x.float() - x.float().mean(-1, keepdim=True)
        return self.scale * (y * torch.rsqrt(y.abs().mean(-1, keepdim=True) + self.small)).to(x.dtype)


def test_another_norm_is_not_an_rms_norm(registry):
    assert ask(registry, "rms_norm", MeanNorm()) is None
    assert ask(registry, "rms_norm", nn.LayerNorm(12)) is None
    assert ask(registry, "layer_norm", nn.LayerNorm(12, eps=1e-4)).traits["eps"] == 1e-4


def test_machine_epsilon_is_a_variant(registry):
    found = ask(registry, "rms_norm", nn.RMSNorm(12))
    assert found.status == "variant"
    assert "eps is None" in found.differs[0]


class Ffn(nn.Module):
    def __init__(self, act=None, limit=2.0):
        super().__init__()
        self.one, self.two = nn.Linear(6, 10, bias=False), nn.Linear(6, 10, bias=False)
        self.packed, self.back = nn.Linear(6, 20, bias=False), nn.Linear(10, 6, bias=False)
        self.act, self.limit = act or nn.SiLU(), limit


class TwoProjections(Ffn):
    def forward(self, x):
        return self.back(self.two(x) * self.act(self.one(x)))


class Packed(Ffn):
    def forward(self, x):
        gate, up = self.packed(x).chunk(2, dim=-1)
        return self.back(self.act(gate) * up)


class Clamped(Ffn):
    def forward(self, x):
        both = self.packed(x)
        gate, up = both[..., ::2], both[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return self.back((up + 1) * (gate * torch.sigmoid(gate * 1.702)))


@pytest.mark.parametrize(
    ("module", "traits"),
    [
        (TwoProjections(), {"activation": "silu", "packed": False}),
        (TwoProjections(nn.GELU(approximate="tanh")), {"activation": "gelu_tanh"}),
        (TwoProjections(nn.GELU()), {"activation": "gelu"}),
        (Packed(), {"activation": "silu", "packed": True}),
        (Clamped(), {"alpha": 1.702, "limit": 2.0, "shift": 1.0}),
    ],
)
def test_gated_forms_are_known_and_their_bindings_give_upstreams_numbers(registry, module, traits):
    found = ask(registry, "gated_activation", module)
    assert found.status == "known", found
    assert traits.items() <= found.traits.items()
    x = torch.randn(3, 6) * 4
    bound = Bound(module, found.binding)
    got = bound.finish(registry.op("gated_activation").reference(**bound.arguments((x,), {})))
    torch.testing.assert_close(got, module(x))


class Swapped(Ffn):
    def forward(self, x):
        up, gate = self.packed(x).chunk(2, dim=-1)
        return self.back(self.act(gate) * up)


class Ungated(Ffn):
    def forward(self, x):
        return self.back(self.act(self.one(x)))


class Scaled(Ffn):
    def forward(self, x):
        return self.back(self.act(self.one(x) * self.limit) * self.two(x)) * 0.5


@pytest.mark.parametrize(("cls", "words"), [(Swapped, "gate is"), (Ungated, "not gated"), (Scaled, "also uses limit")])
def test_other_feed_forwards_are_variants(registry, cls, words):
    found = ask(registry, "gated_activation", cls())
    assert found.status == "variant"
    assert words in found.differs[0]


def turn(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def half(a, b, c, s, unsqueeze_dim=1):
    c, s = c.unsqueeze(unsqueeze_dim), s.unsqueeze(unsqueeze_dim)
    return a * c + turn(a) * s, b * c + turn(b) * s


def swapped_sign(a, b, c, s):
    c, s = c.unsqueeze(1), s.unsqueeze(1)
    return a * c - turn(a) * s, b * c - turn(b) * s


def one(x, c, s):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)


def pairs(a, b, c, s):
    c, s = c[..., : c.shape[-1] // 2].unsqueeze(1), s[..., : s.shape[-1] // 2].unsqueeze(1)
    return one(a, c, s), one(b, c, s)


def test_rope_layout_is_found_by_its_numbers(registry):
    found = ask(registry, "rope", half, "function")
    assert (found.status, found.traits["layout"]) == ("known", "half")
    assert {a.name: a.path for a in found.binding.args if a.source == "forward"}["cos"] == "c"
    assert ask(registry, "rope", pairs, "function").traits["layout"] == "interleaved"
    assert ask(registry, "rope", swapped_sign, "function") is None
    assert ask(registry, "rope", turn, "function") is None


TABLE = list(E2M1)


def unpack(codes, exponents, dtype=torch.float32):
    table = torch.tensor(TABLE, dtype=dtype)
    low, high = table[(codes & 0x0F).long()], table[(codes >> 4).long()]
    values = torch.stack((low, high), dim=-1).flatten(-2)
    return torch.ldexp(values, exponents.int().unsqueeze(-1) - 127).flatten(-2)


def unpack_high_first(codes, exponents, dtype=torch.float32):
    table = torch.tensor(TABLE, dtype=dtype)
    low, high = table[(codes & 0x0F).long()], table[(codes >> 4).long()]
    values = torch.stack((high, low), dim=-1).flatten(-2)
    return torch.ldexp(values, exponents.int().unsqueeze(-1) - 127).flatten(-2)


def test_mxfp4_unpack_is_proved_on_bytes(registry):
    found = ask(registry, "mxfp4_unpack", unpack, "function")
    assert (found.status, found.traits["layout"], found.traits["output"]) == ("known", "blocks", "float32")
    wrong = ask(registry, "mxfp4_unpack", unpack_high_first, "function")
    assert wrong.status == "variant"
    assert wrong.binding is None


class Scorer(nn.Module):
    def __init__(self, k=2, experts=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 8))
        self.bonus, self.k = nn.Parameter(torch.zeros(experts)), k

    def forward(self, x):
        logits = F.linear(x.float(), self.weight.float())
        scores = torch.sigmoid(logits)
        chosen = torch.topk(scores + self.bonus, self.k, dim=-1)[1]
        picked = scores.gather(1, chosen)
        return logits, picked / picked.sum(-1, keepdim=True), chosen


def test_router_traits(registry):
    found = ask(registry, "router", Scorer())
    wanted = {"experts": 6, "top_k": 2, "scoring": "sigmoid", "correction": True, "renormalise": True, "grouped": False}
    assert found.status == "known"
    assert wanted.items() <= found.traits.items()


def test_convolution_over_time(registry):
    assert ask(registry, "causal_conv", nn.Conv1d(4, 4, 3, groups=4, padding=2)).status == "known"
    wide = ask(registry, "causal_conv", nn.Conv1d(4, 4, 3, groups=1, padding=2))
    assert (wide.status, "depthwise" in wide.differs[0]) == ("variant", True)
