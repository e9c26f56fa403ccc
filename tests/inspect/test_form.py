"""Forms: what wiping names leaves the same, and what it tells apart."""

from __future__ import annotations

import ast
import keyword

from hypothesis import given
from hypothesis import strategies as st

from dz.inspect.form import assigned, called_methods, config_reads, form

SOURCE = '''
def forward(self, {x}, {y}=None):
    """Says what it does."""
    logger.warning("not counted")
    {z} = self.{a}({x}).view(-1, 2)
    if {y} is not None:
        {z} = {z} * {y}
    for {k} in range(3):
        {z} = {z} + {k}
    return torch.softmax({z}, dim=-1)
'''
NAMES = {"x": "x", "y": "y", "z": "z", "k": "k", "a": "proj"}


def parsed(**names):
    return ast.parse(SOURCE.format(**{**NAMES, **names})).body[0]


def function(text):
    return ast.parse(text).body[0]


taken = {"self", "torch", "range", "logger", *keyword.kwlist, *keyword.softkwlist}
identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda s: s not in taken)


@given(st.lists(identifiers, min_size=5, max_size=5, unique=True))
def test_names_do_not_matter(names):
    plain, renamed = form([parsed()]), form([parsed(**dict(zip(NAMES, names, strict=True)))])
    assert (plain.features, plain.digest) == (renamed.features, renamed.digest)
    assert [s.line for s in plain.statements] == [s.line for s in renamed.statements]


def test_statements_keep_their_lines_and_texts():
    found = form([parsed()]).statements
    assert [(s.line, s.text) for s in found] == [
        (5, "z = self.proj(x).view(-1, 2)"),
        (6, "if y is not None:"),
        (7, "z = z * y"),
        (8, "for k in range(3):"),
        (9, "z = z + k"),
        (10, "return torch.softmax(z, dim=-1)"),
    ]


def test_what_is_computed_matters():
    plain = form([parsed()])
    for before, after in (("softmax", "sigmoid"), ("* {y}", "+ {y}"), ("dim=-1", "dim=1"), ("range(3)", "range(4)")):
        other = form([ast.parse(SOURCE.replace(before, after).format(**NAMES)).body[0]])
        assert other.digest != plain.digest
        assert len(other.statements) == len(plain.statements)
        assert sum(a.digest != b.digest for a, b in zip(other.statements, plain.statements, strict=True)) == 1


def test_methods_are_followed_once():
    body = "class A:\n def forward(self, x): return self.a(x) + self.b(x)\n def a(self, x): return self.b(x)\n"
    cls = ast.parse(body + " def b(self, x): return self.a(x)\n def c(self): return 1\n").body[0]
    methods = {m.name: m for m in cls.body}
    assert [f.name for f in called_methods(methods["forward"], methods.get)] == ["forward", "a", "b"]


def test_keys_and_attributes_of_a_constructor():
    init = function(
        "def __init__(self, config, i):\n"
        "    self.a = config.size\n    self.b: int = self.config.layers[i]\n"
        "    self.c = getattr(config, 'maybe', 3) + config['plain'] + vision_config.patch\n"
        "    self.register_buffer('table', None)\n    other.d = 1\n"
    )
    assert config_reads(init) == {"size", "layers", "maybe", "plain", "patch"}
    assert assigned(init) == {"a", "b", "c", "table"}
