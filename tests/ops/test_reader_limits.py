"""What the reader once stumbled over, and projections that are spelled as products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dz.core.inventory import SiteView
from dz.ops import linear
from dz.ops._live import Unreadable
from dz.ops._reader import read


def site(target):
    return SiteView(kind="module", fqn="x", target=target, source="", config=None)


class Base(nn.Module):
    """A leaf."""

    def forward(self, x):
        return x * 2


class Heir(Base):
    """A leaf that leaves its work to its base."""

    def forward(self, x):
        return super().forward(x) + 1


class Holder(nn.Module):
    """Calls such a leaf."""

    def __init__(self):
        super().__init__()
        self.inner = Heir()

    def forward(self, x):
        return self.inner(x)


def test_super_of_a_child_is_unreadable_and_no_crash():
    assert read(Heir()).root[0] == "add"
    with pytest.raises(Unreadable, match="super"):
        read(Holder())


def helper(x, scale=1.0, **kwargs):
    """Takes what it is given."""
    if kwargs:
        return x * scale
    return x


class Keywords(nn.Module):
    """Hands a keyword on that its helper does not name."""

    def forward(self, x, mask=None):
        return helper(x, scale=3.0, mask=mask)


def test_keywords_that_a_helper_does_not_name_are_no_crash():
    read(Keywords())


class Product(nn.Linear):
    """x @ weight.T + bias, spelled so."""

    def forward(self, input):
        out = input @ self.weight.T
        return out if self.bias is None else out + self.bias


class InOut(nn.Module):
    """weight [in, out], by addmm."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(5, 7)), nn.Parameter(torch.zeros(7))

    def forward(self, x):
        shape = x.size()[:-1] + (7,)  # noqa: RUF005
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class More(Product):
    """Something after it."""

    def forward(self, input):
        return torch.tanh(input @ self.weight.T)


def test_projections_spelled_as_products_are_known():
    for module, traits in (
        (Product(5, 7), {"in": 5, "out": 7, "bias": True, "transposed": False}),
        (Product(5, 7, bias=False), {"in": 5, "out": 7, "bias": False, "transposed": False}),
        (InOut(), {"in": 5, "out": 7, "bias": True, "transposed": True}),
    ):
        found = linear.recognise(site(module))
        assert (found.status, found.traits, found.binding) == ("known", traits, None)
    assert linear.recognise(site(More(5, 7))) is None
