"""Experts and gated activations against formulas written out for one token."""

import math

import pytest
import torch

from dz.errors import UsageError
from dz.ops import experts, gated_activation

CASES = {c.id: c.args for c in experts.inputs("float64", "cpu", 2)}


def one_token(x, w1, w2, b1, b2, act):
    hidden = w1 @ x + (0 if b1 is None else b1)
    return w2 @ act(hidden) + (0 if b2 is None else b2)


def by_hand(args: dict, act) -> torch.Tensor:
    out = torch.zeros_like(args["x"])
    count = args["gate_up"].shape[0]
    for t in range(args["x"].shape[0]):
        for e, w in zip(args["index"][t].tolist(), args["weight"][t].double(), strict=True):
            if not 0 <= e < count:
                continue
            w1, w2 = args["gate_up"][e], args["down"][e]
            if args.get("transposed"):
                w1, w2 = w1.T, w2.T
            b1, b2 = (None if args.get(n) is None else args[n][e] for n in ("gate_up_bias", "down_bias"))
            out[t] += w * one_token(args["x"][t], w1, w2, b1, b2, act)
    return out


def swiglu(h):
    gate, up = h.chunk(2)
    return gate / (1 + torch.exp(-gate)) * up


def clamped(h):
    gate, up = h[0::2].clamp(max=7), h[1::2].clamp(-7, 7)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


def limited(h):
    gate, up = h.chunk(2)
    return swiglu(torch.cat((gate.clamp(max=0.5), up.clamp(-0.5, 0.5))))


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("t7_e5_k2", swiglu),
        ("transposed_biased_clamped_interleaved", clamped),
        ("limit_only", limited),
        ("all_tokens_one_expert", swiglu),
        ("ids_of_other_ranks", swiglu),
        ("nowhere_here", swiglu),
        ("repeated_id", swiglu),
        ("relu2_not_gated", lambda h: h.clamp(min=0) ** 2),
        ("one_token_many_experts", swiglu),
        ("no_tokens", swiglu),
    ],
)
def test_against_a_loop(name, act):
    torch.testing.assert_close(experts.reference(**CASES[name]), by_hand(CASES[name], act))


def test_clamps_and_biases_bind_in_the_case():
    args = CASES["transposed_biased_clamped_interleaved"]
    for name, value in (("limit", None), ("shift", 0.0), ("alpha", 1.0), ("interleaved", False), ("down_bias", None)):
        assert (experts.reference(**{**args, name: value}) - experts.reference(**args)).abs().max() > 1e-3, name


def scalar(name, g, u, **caps):
    forms = {
        "silu": lambda: g / (1 + math.exp(-g)) * u,
        "gelu": lambda: 0.5 * g * (1 + math.erf(g / math.sqrt(2))) * u,
        "gelu_tanh": lambda: 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
        "relu": lambda: max(g, 0.0) * u,
        "relu2": lambda: max(g, 0.0) ** 2 * u,
        "sigmoid": lambda: 1 / (1 + math.exp(-g)) * u,
        "situ": lambda: 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25),
    }
    return forms[name]()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "situ"])
def test_activation_against_math(name):
    g, u = torch.linspace(-9, 9, 41, dtype=torch.float64), torch.linspace(40, -40, 41, dtype=torch.float64)
    want = torch.tensor([scalar(name, a, b) for a, b in zip(g.tolist(), u.tolist(), strict=True)], dtype=torch.float64)
    torch.testing.assert_close(gated_activation.reference(g, u, activation=name), want)
    torch.testing.assert_close(gated_activation.reference(torch.cat((g, u)), activation=name), want)
    alternating = torch.stack((g, u), -1).flatten()
    torch.testing.assert_close(gated_activation.reference(alternating, activation=name, interleaved=True), want)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"activation": "swish2"}, "swish2"),
        ({"activation": "gelu", "alpha": 1.702}, "alpha 1.702 for gelu"),
        ({"up": torch.zeros(4), "interleaved": True}, "interleaved"),
        ({"gate": torch.zeros(3)}, "3 columns"),
    ],
)
def test_what_does_not_fit_is_refused(args, words):
    with pytest.raises(UsageError, match=words):
        gated_activation.reference(**{"gate": torch.zeros(4), **args})
