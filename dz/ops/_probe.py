"""Recognise functions by running them on small random inputs: rotary embedding and MXFP4 unpacking.

A function becomes a candidate by its structure alone; the probe then finds the layout, and proves it."""

from __future__ import annotations

import ast
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch

from dz.core.inventory import Arg, Binding, Match, SiteView
from dz.ops._live import Unreadable, source
from dz.ops._reader import read
from dz.ops._tree import walk

_HEADS, _TOKENS, _DIM = 3, 5, 12


def _try(f: Callable[..., Any], *args: Any) -> Any:
    try:
        with torch.no_grad():
            return f(*args)
    except Exception:  # noqa: BLE001  a wrong guess at a layout may fail in any way; it is one of many guesses
        return None


def rope(site: SiteView, reference: Callable[..., Any]) -> Match | None:
    """A function of (q, k, cos, sin) or (x, cos, sin) that rotates pairs of channels."""
    f = site.target
    if site.kind != "function" or not isinstance(f, types.FunctionType):
        return None
    names = [
        n for n, p in inspect.signature(f).parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(names) < 3 or not _rotates(f, names):
        return None
    for pair in (True, False):
        if pair and len(names) < 4:
            continue
        for guess in _guesses():
            if _fits(f, reference, pair, guess):
                return _rope_match(names, pair, guess)
    if any(n[0] == "view_as_complex" for n in walk(read(f).root)):
        return Match(op="rope", status="variant", reason="rotates channels", differs=("it takes complex angles",))
    return None


def _rotates(f: Any, names: list[str]) -> bool:
    """Whether the result adds products of one argument, taken apart, with two others."""
    try:
        root = read(f).root
    except Unreadable:
        return False
    nodes = walk(root)
    split = any(
        n[0] in ("part", "stride", "getitem", "reshape", "split") and any(m[0] == "arg" for m in walk(n)) for n in nodes
    )
    products = {m[1] for n in nodes if n[0] == "mul" for m in walk(n) if m[0] == "arg"}
    turned = any(n[0] in ("neg", "sub", "view_as_complex") for n in nodes)
    return (
        split
        and turned
        and len(products & set(names)) >= 3
        and not any(n[0] in ("matmul", "softmax", "callmod", "linear") for n in nodes)
    )


def _guesses() -> list[dict[str, Any]]:
    out = []
    for layout, tiled, trailing, partial, flat in itertools.product(
        ("half", "interleaved", "interleaved_to_half"), (True, False), (False, True), (False, True), (False, True)
    ):
        if not (trailing and not partial):
            out.append({"layout": layout, "tiled": tiled, "trailing": trailing, "partial": partial, "flat": flat})
    return out


def _fits(f: Any, reference: Callable[..., Any], pair: bool, g: dict[str, Any]) -> bool:
    gen = torch.Generator().manual_seed(7)
    lead = (_TOKENS, _HEADS, _DIM) if g["flat"] else (1, _HEADS, _TOKENS, _DIM)
    q, k = torch.randn(lead, generator=gen), torch.randn(lead, generator=gen)
    pairs = (_DIM if not g["partial"] else _DIM - 4) // 2
    angles = torch.randn((_TOKENS, pairs) if g["flat"] else (1, _TOKENS, pairs), generator=gen)
    table = torch.cat((angles, angles), -1) if g["tiled"] else angles
    cos, sin = table.cos(), table.sin()
    want = reference(q, k, cos, sin, layout=g["layout"], trailing=g["trailing"], tiled=g["tiled"], unsqueeze_dim=1)
    got = _try(f, q.clone(), k.clone(), cos, sin) if pair else _try(f, q.clone(), cos, sin)
    if pair:
        return isinstance(got, tuple) and len(got) == 2 and all(_close(a, b) for a, b in zip(got, want, strict=True))
    return _close(got, want[0])


def _close(a: Any, b: torch.Tensor) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and a.shape == b.shape
        and torch.allclose(a.float(), b.float(), atol=1e-5, rtol=1e-5)
    )


def _rope_match(names: list[str], pair: bool, g: dict[str, Any]) -> Match:
    traits = {k: g[k] for k in ("layout", "tiled", "trailing", "partial")} | {"arguments": names}
    words = f"{g['layout']} pairs" + (
        ", trailing part of the head" if g["trailing"] else ", part of the head" if g["partial"] else ""
    )
    if not pair:
        return Match(
            op="rope",
            status="variant",
            reason=words,
            differs=("rotates one tensor, the op rotates queries and keys",),
            traits=traits,
        )
    args = [Arg(name=n, source="forward", path=p) for n, p in zip(("q", "k", "cos", "sin"), names[:4], strict=True)]
    args += [Arg(name=n, source="constant", value=g[n]) for n in ("layout", "trailing", "tiled")]
    if "unsqueeze_dim" in names:
        args.append(Arg(name="unsqueeze_dim", source="forward", path="unsqueeze_dim"))
    return Match(
        op="rope", status="known", reason=f"{words}; a probe agrees", binding=Binding(args=tuple(args)), traits=traits
    )


def mxfp4_unpack(site: SiteView, reference: Callable[..., Any]) -> Match | None:
    """A function of (packed, scales[, dtype]) that takes nibbles apart; the probe finds its layout."""
    f = site.target
    if site.kind != "function" or not isinstance(f, types.FunctionType) or not _unpacks(f):
        return None
    parameters = inspect.signature(f).parameters
    names = list(parameters)
    needed = [
        n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    dtype = next((n for n in names[2:] if "dtype" in n), None)
    if len(names) < 2 or len(set(needed) - {dtype}) > 2:
        return None
    for order, layout, swapped in itertools.product(((0, 1), (1, 0)), ("blocks", "flat"), (False, True)):
        answer = _probe_unpack(f, reference, order, layout, dtype, swapped)
        if answer is not None:
            return _unpack_match(names, order, layout, dtype, swapped, answer)
    return Match(
        op="mxfp4_unpack",
        status="variant",
        reason="takes nibbles apart",
        differs=("no layout of the op gives its numbers",),
    )


def _unpacks(f: types.FunctionType, depth: int = 2) -> bool:
    """Whether a function, or one that it calls, masks with 15 and shifts by 4."""
    try:
        body = source(inspect.unwrap(f))
    except Unreadable:
        return False
    masks = any(
        isinstance(n, ast.BinOp) and isinstance(n.op, ast.BitAnd) for n in ast.walk(body)
    ) or "bitwise_and" in ast.dump(body)
    shifts = any(
        isinstance(n, ast.BinOp) and isinstance(n.op, (ast.RShift, ast.FloorDiv)) for n in ast.walk(body)
    ) or "right_shift" in ast.dump(body)
    constants = {n.value for n in ast.walk(body) if isinstance(n, ast.Constant) and isinstance(n.value, int)}
    if masks and shifts and 15 in constants and constants & {4, 16}:
        return True
    called = [
        f.__globals__.get(n.func.id) for n in ast.walk(body) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    return depth > 0 and any(
        isinstance(c, types.FunctionType) and c is not f and _unpacks(c, depth - 1) for c in called
    )


def _probe_unpack(
    f: Any, reference: Callable[..., Any], order: tuple[int, int], layout: str, dtype: str | None, swapped: bool
) -> str | None:
    """The dtype that comes out by default when the function agrees with the op on random bytes, else None."""
    gen = torch.Generator().manual_seed(11)
    out = None
    for scale_dtype, rows in itertools.product((torch.uint8, torch.float8_e8m0fnu), ((2, 3), (5,))):
        packed = torch.randint(0, 256, (*rows, 2, 16), generator=gen, dtype=torch.uint8)
        scales = torch.randint(118, 136, (*rows, 2), generator=gen, dtype=torch.uint8)
        want = reference(packed, scales, dtype="float32")
        given = packed if layout == "blocks" else packed.flatten(-2)
        args = [given.clone(), scales.clone().view(scale_dtype)]
        got = (
            _try(f, *(args[i] for i in order))
            if dtype is None
            else _try(lambda a, b: f(a, b, **{dtype: torch.float32}), *(args[i] for i in order))
        )
        if isinstance(got, torch.Tensor) and swapped and got.dim() >= 2:
            got = got.transpose(-1, -2)
        if _close(got, want) and torch.equal(got.float(), want):
            plain = _try(f, *(args[i] for i in order))
            out = str(plain.dtype if isinstance(plain, torch.Tensor) else got.dtype).removeprefix("torch.")
    return out


def _unpack_match(
    names: list[str], order: tuple[int, int], layout: str, dtype: str | None, swapped: bool, default: str
) -> Match:
    traits = {"layout": layout, "output": default, "arguments": names}
    if swapped:
        return Match(
            op="mxfp4_unpack",
            status="variant",
            reason="MXFP4 to floating point",
            differs=("it returns its last two axes swapped",),
            traits=traits,
        )
    args = [
        Arg(name="packed", source="forward", path=names[order[0]]),
        Arg(name="scales", source="forward", path=names[order[1]]),
    ]
    args.append(
        Arg(name="dtype", source="forward", path=dtype, value=default)
        if dtype
        else Arg(name="dtype", source="constant", value=default)
    )
    return Match(
        op="mxfp4_unpack",
        status="known",
        reason=f"MXFP4 {layout} to {default}; a probe agrees bit for bit",
        binding=Binding(args=tuple(args)),
        traits=traits,
    )


def rope_table(site: SiteView) -> Match | None:
    """A module without parameters that turns positions into cosines and sines."""
    m = site.target
    if site.kind != "module" or not isinstance(m, torch.nn.Module) or next(m.parameters(), None) is not None:
        return None
    buffers = {n: list(b.shape) for n, b in m.named_buffers(recurse=False)}
    try:
        calls = ast.dump(source(inspect.unwrap(type(m).forward)))
    except (Unreadable, AttributeError):
        return None
    if not buffers or not ("'polar'" in calls or ("'cos'" in calls and "'sin'" in calls)):
        return None
    traits = {"role": "table", "frequencies": buffers, "type": getattr(m, "rope_type", None)}
    return Match(
        op="rope",
        status="known",
        reason="makes the cosines and sines",
        traits={k: v for k, v in traits.items() if v is not None},
    )


def conv_function(site: SiteView, reference: Callable[..., Any]) -> Match | None:
    """A function of (x, weight, bias, activation), or with a state after x that it moves on."""
    f = site.target
    if not isinstance(f, types.FunctionType) or "conv1d" not in site.source:
        return None
    gen = torch.Generator().manual_seed(13)
    x, w, b, state = (torch.randn(s, generator=gen) for s in ((2, 6, 5), (6, 4), (6,), (2, 6, 3)))
    want = reference(x, w, b, activation="silu")[0]
    if _close(_try(f, x.clone(), w, b, "silu"), want):
        return Match(op="causal_conv", status="known", reason="depthwise over a whole sequence; a probe agrees")
    one, moved = x[..., :1], state.clone()
    want = reference(one, w, b, state=state, activation="silu")
    if _close(_try(f, one.clone(), moved, w, b, "silu"), want[0]) and _close(moved, want[1]):
        differs = ("it moves its state on in place",)
        return Match(op="causal_conv", status="variant", reason="depthwise, one step", differs=differs)
    return None
