"""The gated delta rules: meaning of their arguments, and recognition of functions that no published model has."""

import inspect
from typing import Any

import pytest
import torch

from dz.core.inventory import SiteView
from dz.core.registry import Registry
from dz.errors import UsageError
from dz.ops.gated_delta_rule import reference as gated
from dz.ops.kda import log_decay
from dz.ops.kda import reference as kda
from dz.verify.bound import Bound

REGISTRY = Registry.discover()


def given(batch=2, tokens=5, heads=2, dim=4, dim_v=8) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)
    q, k, g = torch.randn(3, batch, tokens, heads, dim, generator=gen)
    v = torch.randn(batch, tokens, heads, dim_v, generator=gen)
    return {"q": q, "k": k, "v": v, "g": -g.abs(), "beta": torch.rand(batch, tokens, heads, generator=gen)}


def recurrent(query, key, value, g, beta, initial_state, output_final_state, use_l2norm=False):
    if use_l2norm:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    state, out = initial_state, []
    for t in range(query.shape[1]):
        state = state * g[:, t].exp()[..., None]
        d = (value[:, t] - torch.einsum("bhk,bhkv->bhv", key[:, t], state)) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * d[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", query[:, t] * query.shape[-1] ** -0.5, state))
    return torch.stack(out, 1), state if output_final_state else None


def plain(a, b, c, log, beta, state):
    """Scaled and normalised by its caller."""
    log = log.exp().log()
    return recurrent(a * a.shape[-1] ** 0.5, b, c, log, beta, state, True)


def one_decay(query, key, value, g, beta, state, return_final=True):
    return recurrent(query, key, value, g[..., None].exp().log(), beta, state, return_final)


def decay_last(query, key, value, g, beta, state):
    """Reads before it forgets: not the op."""
    later = torch.cat((torch.zeros_like(g[:, :1]), g[:, :-1]), 1).exp().log()
    return recurrent(query, key, value, later, beta, state, True)


def one_result(query, key, value, g, beta, state):
    return recurrent(query, key, value, g.exp().log(), beta, state, True)[0]


def ask(op, f):
    view = SiteView(kind="function", fqn="f", target=f, source=inspect.getsource(f), config=None)
    return REGISTRY.op(op).recognise(view)


@pytest.mark.parametrize(
    ("f", "op", "extra"),
    [(recurrent, "kda", {"use_l2norm": True}), (recurrent, "kda", {}), (plain, "kda", {}),
     (one_decay, "gated_delta_rule", {})],
)  # fmt: skip
def test_functions_are_known_and_their_bindings_give_their_numbers(f, op, extra):
    found = ask(op, f)
    assert found.status == "known"
    args = given()
    if op == "gated_delta_rule":
        args["g"] = args["g"][..., 0]
    state = torch.randn(2, 2, 4, 8)
    flags = {"output_final_state": True} if f is recurrent else {}
    bound = Bound(f, found.binding)
    got = bound.finish(REGISTRY.op(op).reference(**bound.arguments((*args.values(), state), {**flags, **extra})))
    for a, b in zip(got, f(*args.values(), state, **flags, **extra), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("f", [decay_last, one_result, given])
def test_near_misses_are_not_known(f, op):
    assert ask(op, f) is None


def test_each_op_leaves_the_other_alone():
    assert ask("gated_delta_rule", recurrent) is None
    assert ask("kda", one_decay) is None


def test_a_lower_bound_is_another_function_and_no_clamp():
    x, a = torch.tensor([[[-3.0, 0.0, 50.0]]]), torch.tensor([0.5])
    soft, bounded = log_decay(x, a, None, None), log_decay(x, a, None, -5.0)
    assert soft[..., 2] == pytest.approx(-50 * a.exp().item(), rel=1e-5)
    assert (bounded >= -5).all() and bounded[..., 1] == -2.5
    assert not torch.allclose(bounded, soft.clamp(min=-5))
    assert torch.equal(log_decay(x, None, None, None), x)


def test_packed_sequences_are_what_each_is_alone():
    args = given(batch=1, tokens=7)
    state = torch.randn(3, 2, 4, 8)
    out, new = kda(**args, state=state, cu_seqlens=torch.tensor([0, 3, 3, 7]))
    for i, (a, b) in enumerate(((0, 3), (3, 3), (3, 7))):
        alone = kda(**{k: x[:, a:b] for k, x in args.items()}, state=state[i : i + 1])
        torch.testing.assert_close(out[:, a:b], alone[0])
        torch.testing.assert_close(new[i : i + 1], alone[1])


def test_one_decay_is_the_same_decay_in_every_channel():
    args = given()
    args["g"] = args["g"][..., :1]
    a = kda(**{**args, "g": args["g"].expand(2, 5, 2, 4)})
    b = gated(**{**args, "g": args["g"][..., 0]})
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("extra", "words"),
    [({"state": torch.zeros(2, 2, 8, 4)}, r"\[2, 2, 8, 4\]"), ({"cu_seqlens": torch.tensor([0, 5])}, "batch of 2")],
)
def test_shapes_that_do_not_fit_are_refused(extra, words):
    with pytest.raises(UsageError, match=words):
        kda(**given(), **extra)
