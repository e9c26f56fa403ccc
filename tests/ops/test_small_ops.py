"""Norms, rope, convolution, embedding, linear and head against PyTorch or a formula written out."""

import pytest
import torch
import torch.nn.functional as F

from dz.errors import UsageError
from dz.ops import causal_conv, embedding, layer_norm, linear, lm_head, rms_norm, rope


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rms_norm_against_torch():
    x, w = normal(5, 33), normal(33, seed=1)
    torch.testing.assert_close(rms_norm.reference(x, w, eps=1e-3), F.rms_norm(x, (33,), w, 1e-3))
    torch.testing.assert_close(rms_norm.reference(x, w, eps=1e-3, offset=1.0), F.rms_norm(x, (33,), w + 1, 1e-3))
    y, h = rms_norm.reference(x, w, eps=1e-3, residual=x * 2)
    torch.testing.assert_close((y, h), (F.rms_norm(x * 3, (33,), w, 1e-3), x * 3))


def test_rms_norm_cast_order_is_upstreams_two_forms():
    x, w = normal(64, 96).bfloat16(), (1 + 0.3 * normal(96, seed=1)).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    first, last = w * normed.bfloat16(), (w.float() * normed).bfloat16()
    assert torch.equal(rms_norm.reference(x, w), first)
    assert torch.equal(rms_norm.reference(x, w, cast_first=False), last)
    assert not torch.equal(first, last)
    assert rms_norm.reference(x, w.float()).dtype == torch.float32
    assert rms_norm.reference(x, w.float(), cast_first=False).dtype == torch.bfloat16


def test_layer_norm_against_torch():
    x, w, b = normal(5, 33) + 3, normal(33, seed=1), normal(33, seed=2)
    for weight, bias in ((w, b), (w, None), (None, None)):
        torch.testing.assert_close(
            layer_norm.reference(x, weight, bias, eps=1e-3), F.layer_norm(x, (33,), weight, bias, 1e-3)
        )
    assert (layer_norm.reference(x, w, b) - rms_norm.reference(x, w) - b).abs().max() > 0.1


def complex_rotation(x, positions, pairs, layout):
    """Pairs as complex numbers times e^(i * angle), arXiv:2104.09864."""
    first, second = (x[..., :pairs], x[..., pairs:]) if layout == "half" else (x[..., 0::2], x[..., 1::2])
    turned = torch.complex(first, second) * torch.exp(1j * rope.angles(positions, pairs).double())[:, None]
    if layout == "interleaved":
        return torch.stack((turned.real, turned.imag), -1).flatten(-2)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("layout", rope.LAYOUTS)
def test_rope_is_a_rotation_of_its_pairs(layout):
    q, k, at = normal(2, 3, 5, 8), normal(2, 1, 5, 8, seed=1), torch.tensor([[0, 1, 2, 3, 4], [9, 70, 71, 72, 500]])
    a = rope.angles(at, 4).double()
    cos, sin = torch.cat((a, a), -1).cos(), torch.cat((a, a), -1).sin()
    got = rope.reference(q, k, cos, sin, layout=layout)
    for out, x in zip(got, (q, k), strict=True):
        torch.testing.assert_close(out, complex_rotation(x, at, 4, layout))
    single = rope.reference(q, k, a.cos(), a.sin(), layout=layout, tiled=False)
    torch.testing.assert_close(single, got)


def test_rope_layouts_differ_and_the_permuting_one_keeps_dot_products():
    q, k = normal(1, 1, 6, 8), normal(1, 1, 6, 8, seed=1)
    a = rope.angles(torch.arange(6)[None], 4).double()
    made = {n: rope.reference(q, k, a.cos(), a.sin(), layout=n, tiled=False) for n in rope.LAYOUTS}
    scores = {n: x @ y.transpose(-1, -2) for n, (x, y) in made.items()}
    torch.testing.assert_close(scores["interleaved"], scores["interleaved_to_half"])
    assert (scores["half"] - scores["interleaved"]).abs().max() > 0.1


@pytest.mark.parametrize("trailing", [False, True])
def test_partial_rope_leaves_the_rest(trailing):
    q = normal(1, 2, 3, 10)
    a = rope.angles(torch.arange(1, 4)[None], 2).double()
    out, _ = rope.reference(q, q, a.cos(), a.sin(), tiled=False, trailing=trailing)
    kept, turned = (slice(0, 6), slice(6, 10)) if trailing else (slice(4, 10), slice(0, 4))
    assert torch.equal(out[..., kept], q[..., kept])
    torch.testing.assert_close(out[..., turned], complex_rotation(q[..., turned], torch.arange(1, 4)[None], 2, "half"))


def test_rope_refuses_what_does_not_fit():
    x = normal(1, 1, 1, 4)
    with pytest.raises(UsageError, match="neox"):
        rope.reference(x, x, x[:, 0], x[:, 0], layout="neox")
    with pytest.raises(UsageError, match="6 channels"):
        rope.rotate(x, normal(3), normal(3))


@pytest.mark.parametrize("split", [0, 1, 2, 5, 11, 12])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_conv_in_pieces_equals_torch_in_one(split, width):
    x, w, b = normal(2, 6, 12), normal(6, width, seed=1), normal(6, seed=2)
    want = F.silu(F.conv1d(x, w[:, None], b, padding=width - 1, groups=6)[..., :12])
    args = {"weight": w, "bias": b, "activation": "silu"}
    first, state = causal_conv.reference(x[..., :split], **args)
    second, last = causal_conv.reference(x[..., split:], state=state, **args)
    torch.testing.assert_close(torch.cat((first, second), -1), want)
    assert torch.equal(last, x[..., 12 - (width - 1) :])


def test_conv_state_of_a_short_start_is_padded_with_zeros_in_front():
    x = normal(1, 2, 2)
    _, state = causal_conv.reference(x, normal(2, 4))
    assert torch.equal(state, F.pad(x, (1, 0)))


def test_packed_conv_equals_one_by_one_and_leaves_the_state():
    lengths, w, state = [3, 0, 1, 6], normal(5, 4), normal(4, 5, 3, seed=3)
    x, before = normal(1, 5, 10, seed=4), state.clone()
    y, new = causal_conv.reference(x, w, state=state, cu_seqlens=torch.tensor([0, 3, 3, 4, 10]))
    parts = [causal_conv.reference(p, w, state=state[i : i + 1]) for i, p in enumerate(x.split(lengths, -1))]
    torch.testing.assert_close(y, torch.cat([p for p, _ in parts], -1))
    assert torch.equal(new, torch.cat([s for _, s in parts])) and torch.equal(state, before)


def test_conv_refuses_a_short_state():
    with pytest.raises(UsageError, match="conv state"):
        causal_conv.reference(normal(1, 2, 3), normal(2, 4), state=normal(1, 2, 2))


def test_embedding_scale_is_rounded_as_upstream_rounds_it():
    table = normal(7, 5).bfloat16()
    ids = torch.tensor([[6, 0], [3, 3]])
    assert torch.equal(embedding.reference(ids, table), table[ids])
    scaled = embedding.reference(ids, table, scale=3072**0.5)
    assert torch.equal(scaled, table[ids] * torch.tensor(3072**0.5).bfloat16())
    with pytest.raises(IndexError):
        embedding.reference(torch.tensor([7]), table)


def test_linear_and_head():
    x, w, b = normal(4, 6), normal(9, 6, seed=1), normal(9, seed=2)
    torch.testing.assert_close(linear.reference(x, w, b), x @ w.T + b)
    torch.testing.assert_close(lm_head.reference(x, w, b), x @ w.T + b)
    capped = lm_head.reference(x, w, b, scale=0.5, softcap=1.5)
    torch.testing.assert_close(capped, 1.5 * torch.tanh((x @ w.T + b) * 0.5 / 1.5))
