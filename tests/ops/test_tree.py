"""Spellings of one operation are one tree; what differs stays different; what cannot be read says why."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dz.ops._live import Unreadable
from dz.ops._reader import read
from dz.ops._tree import binary, find, match, walk


def square_1(x, w):
    return x.pow(2).mean(-1, keepdim=True) * w


def square_2(x, w):
    y = x * x
    return w * torch.mean(y, dim=-1, keepdim=True)


def square_3(x, w):
    return torch.square(x).mean(dim=-1, keepdim=True).mul(w)


def other(x, w):
    return x.pow(3).mean(-1, keepdim=True) * w


def test_spellings_agree():
    assert read(square_1).root == read(square_2).root == read(square_3).root
    assert read(other).root != read(square_1).root


def helper(a, scale=2.0):
    return a.float() * scale


def calls_helper(x):
    return helper(x).to(x.dtype)


def inlined(x):
    return (2.0 * x.to(torch.float32)).type_as(x)


def test_helpers_are_followed_and_named():
    tree = read(calls_helper)
    assert tree.root == read(inlined).root
    assert tree.functions == ["helper"]


class Branching(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.scale = wide, 3.0
        self.inner = nn.SiLU()
        self.proj = nn.Linear(2, 2, bias=False)

    def _half(self, x):
        return x / 2

    def forward(self, x, extra=None):
        if self.wide:
            return self.proj(self.inner(x))
        if self.proj.bias is not None:
            x = x + 1
        return self._half(x) * self.scale


def test_known_values_decide_branches():
    assert read(Branching(True)).root == ("callmod", "proj", ("silu", ("arg", "x")))
    root = read(Branching(False)).root
    assert ("attr", "scale") in walk(root)
    assert not find(("add", ("?", "a"), ("?", "b")), root)


class Child(Branching):
    def forward(self, x):
        return super().forward(x) + 1


def test_super_is_followed():
    assert read(Child(True)).root[0] == "add"


def loops(x):
    for _ in range(3):
        x = x + 1
    return x


def writes(x):
    x[0] = 1
    return x


def has_effect(x):
    print(x)
    return x


@pytest.mark.parametrize(("f", "why"), [(loops, "for statement"), (writes, "writes into"), (has_effect, "effect")])
def test_unreadable_says_why(f, why):
    with pytest.raises(Unreadable, match=why):
        read(f)


def scatters(scores, index):
    mask = torch.zeros_like(scores)
    mask.scatter_(1, index, 1)
    return scores * mask


def test_in_place_on_a_local_is_followed():
    assert find(("scatter", ("?", "m"), ("?", "d"), ("?", "i"), ("?", "v")), read(scatters).root)


def optional(x, gate=None):
    if gate is not None:
        x = x * F.silu(gate)
    return x


def test_branch_on_an_argument_keeps_both_sides():
    root = read(optional).root
    assert root[0] == "if"
    assert root[3] == ("arg", "x")


NODES = st.recursive(
    st.sampled_from([("arg", "x"), ("arg", "y"), ("param", "w"), ("const", 2)]),
    lambda inner: st.tuples(st.sampled_from(["add", "mul", "sub"]), inner, inner),
    max_leaves=12,
)


@given(a=NODES, b=NODES)
def test_commutative_operands_have_one_order(a, b):
    assert binary("add", a, b) == binary("add", b, a)
    assert match(("add", ("?", "p"), ("?", "q")), binary("add", a, b)) is not None or binary("add", a, b)[0] == "const"


@given(node=NODES)
def test_every_tree_matches_itself_and_a_hole(node):
    assert match(node, node) == {}
    assert match(("?", "all"), node) == {"all": node}
