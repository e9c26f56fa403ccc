"""The beginning of a new op: its file and its test. Both run; the test fails until the op is written."""

from __future__ import annotations

import keyword
import os
from collections.abc import Sequence
from pathlib import Path

from dz.core.jsonio import write_text
from dz.errors import Refused, UsageError
from dz.shipped import checkout

KINDS = ("module", "function", "interface")
LONGEST = 60  # letters of a name

_OP = '''"""{title}."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.inventory import Match, SiteView
from dz.core.op import Case, Op
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION


def reference(
{parameters}
) -> torch.Tensor:
    """What the op means, in PyTorch, fp32 inside and the input's dtype outside: shapes, dtypes, and the source of the
    formula go here. Plain and slow is right: kernels are measured against it."""
    raise NotImplementedError("{name}: the reference is not written")


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: ragged, empty, one, long, not contiguous, every option on and off, batch 1 and many."""
    m = Maker(dtype, device, seed)
    yield Case("t7", {{{arguments}}})


def recognise(site: SiteView) -> Match | None:
    """Whether a place in a model is this op: known with its binding, or a variant with what differs. By structure
    alone, never by a name."""
    return None


OP = Op(
    name="{name}",
    summary="{summary}",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    kind="{kind}",
)
'''

_TEST = '''"""The op {name}: its reference against a second way to compute it, its cases, what it recognises."""

import inspect

import pytest
import torch

from dz.core.registry import Registry

OP = Registry.discover().op("{name}")
FEWEST = 6  # cases: ragged, empty, one, long, not contiguous, several


def cases(dtype: str = "float32") -> list:
    return list(OP.inputs(dtype, "cpu", 0))


def tensors(value) -> list[torch.Tensor]:
    found = value if isinstance(value, tuple) else (value,)
    return [t for t in found if isinstance(t, torch.Tensor)]


def second(**args) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The same numbers by another way: a loop over tokens, float64, PyTorch's own function."""
    raise NotImplementedError("{name}: the second way is not written")


def test_there_are_cases_of_every_sort():
    found = cases()
    assert len(found) >= FEWEST
    assert len({{c.id for c in found}}) == len(found)
    for case in found:
        OP.signature.bind(**case.args)


def test_the_reference_agrees_with_a_second_way():
    for case in cases():
        for a, b in zip(tensors(OP.reference(**case.args)), tensors(second(**case.args)), strict=True):
            torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=2e-5, msg=case.id)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_stay_within_tolerance(dtype):
    limit = OP.tolerance[dtype]
    for case in cases(dtype):
        exact = {{k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in case.args.items()}}
        for a, b in zip(tensors(OP.reference(**case.args)), tensors(OP.reference(**exact)), strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=limit.atol, rtol=limit.rtol, msg=case.id)


def test_arguments_are_left_as_they_are():
    for case in cases():
        kept = {{k: v.clone() for k, v in case.args.items() if torch.is_tensor(v)}}
        OP.reference(**case.args)
        assert all(torch.equal(case.args[k], v) for k, v in kept.items()), case.id


def test_its_module_is_recognised_and_another_is_not():
    raise NotImplementedError("{name}: build a module that is this op, and one that is nearly so, and ask OP.recognise")


def test_it_says_what_it_means():
    assert "go here" not in (inspect.getdoc(OP.reference) or "")
'''


def write(name: str, *, arguments: Sequence[str], kind: str, into: Path | None, known: Sequence[str]) -> list[Path]:
    """Write the op's file and its test; returns their paths. `into` is a folder of the shape of `$DZ_PATH` entries
    (default: the checkout, else the first entry of `$DZ_PATH`); `known` are names that ops have.

    Raises UsageError for a name, an argument or a kind that cannot be, Refused where a file is already there."""
    _check(name, arguments, kind, known)
    op, test = _paths(name, into)
    there = [p for p in (op, test) if p.exists()]
    if there:
        what = f"{' and '.join(map(str, there))} is already there"
        raise Refused(what, "dz writes over no file of yours", "delete it, or take another name", code="exists")
    title = name.replace("_", " ").capitalize()
    given = arguments or ("x",)
    fields = {
        "name": name,
        "title": title,
        "summary": title.lower(),
        "kind": kind,
        "parameters": "\n".join(f"    {a}: torch.Tensor," for a in given),
        "arguments": ", ".join(f'"{a}": m.normal(7, 33)' for a in given),
    }
    write_text(op, _OP.format(**fields))
    write_text(test, _TEST.format(**fields))
    return [op, test]


def _check(name: str, arguments: Sequence[str], kind: str, known: Sequence[str]) -> None:
    for word, what in ((name, "an op"), *((a, "an argument") for a in arguments)):
        plain = word.isidentifier() and word.isascii() and word == word.lower() and not keyword.iskeyword(word)
        if not plain or word.startswith("_") or len(word) > LONGEST:
            why = f"it becomes a Python name: up to {LONGEST} small letters, digits and underscores, a letter first"
            what = f"'{word[:LONGEST]}' cannot name {what}"
            raise UsageError(what, why, "dz ops new NAME --args a,b", code="bad_name")
    twice = sorted({a for a in arguments if list(arguments).count(a) > 1})
    if twice:
        raise UsageError(f"--args names {', '.join(twice)} twice", "each is one argument", "mend it", code="bad_name")
    if kind not in KINDS:
        raise UsageError(f"unknown kind '{kind}'", f"it is one of {', '.join(KINDS)}", "mend --kind", code="bad_kind")
    if name in known:
        raise Refused(f"there is an op '{name}'", "names are unique", f"dz ops show {name}", code="exists")


def _paths(name: str, into: Path | None) -> tuple[Path, Path]:
    root = checkout()
    if into is None and root is not None:
        return root / "dz" / "ops" / f"{name}.py", root / "tests" / "ops" / f"test_{name}.py"
    entries = [p for p in os.environ.get("DZ_PATH", "").split(os.pathsep) if p]
    if into is None and not entries:
        why = "dz is installed, not a checkout, and DZ_PATH names no folder"
        raise UsageError("there is no place for the op", why, f"dz ops new {name} --into DIR", code="no_place")
    folder = (into or Path(entries[0])).absolute()
    return folder / "ops" / f"{name}.py", folder / "tests" / f"test_{name}.py"
