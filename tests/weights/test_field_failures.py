"""Failures that were seen in the field, each as a check: scales that went astray on the way from the file."""

import pytest
import torch
from safetensors.torch import save_file

from dz.errors import Refused
from dz.weights import open_checkpoint
from dz.weights.families import fp8, fused
from dz.weights.families.base import Form
from dz.weights.families.recognise import recognise

FP8 = {"quantization_config": {"quant_method": "fp8"}}
E, H, W, B = 3, 384, 128, 64  # H != 2W is what hides a second transpose


def experts():
    g = torch.Generator().manual_seed(5)
    values = torch.randn(E, H, 2 * W, generator=g).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-6, 6, (E, H // B, 2 * W // B), generator=g)
    return values, scale, Form(layout=fp8.BLOCKS, shape=(E, H, 2 * W), group=(B, B))


def test_r22_fused_projections_with_block_scales_equal_a_hand_split():
    values, scale, form = experts()
    whole = fp8.decode(values, scale, form)
    kept = values.view(torch.uint8).clone(), scale.clone()
    for _ in range(2):  # a loader that changed its input would differ the second time
        pieces = fused.cut(values, scale, form, axis=-1, parts=2)
        for n, (own, its) in enumerate(pieces):
            assert own.shape == (E, H, W) and its.shape == (E, H // B, W // B)
            assert torch.equal(fp8.decode(own, its, form), whole[..., n * W : (n + 1) * W])
    assert torch.equal(values.view(torch.uint8), kept[0]) and torch.equal(scale, kept[1])


def test_r22_pieces_are_copies():
    values, scale, form = experts()
    (own, its), _ = fused.cut(values, scale, form, axis=-1, parts=2)
    its.zero_()
    own.view(torch.uint8).zero_()
    assert scale.count_nonzero() == scale.numel() and values.view(torch.uint8).count_nonzero() > 0


@pytest.mark.parametrize("parts", [3, 8])
def test_r22_a_block_that_reaches_over_a_cut_is_refused(parts):
    values, scale, form = experts()
    with pytest.raises(Refused, match="cannot be cut"):
        fused.cut(values, scale, form, axis=-1, parts=parts)


def test_r22_a_channel_scale_goes_with_its_rows():
    values = torch.ones(4, 6).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    form = Form(layout=fp8.CHANNEL, shape=(4, 6), group=(1, 0))
    rows = fused.cut(values, scale, form, axis=-2, parts=2)
    assert [s.flatten().tolist() for _, s in rows] == [[1, 2], [4, 8]]
    columns = fused.cut(values, scale, form, axis=-1, parts=2)
    assert all(torch.equal(s, scale) for _, s in columns)


def test_r23_scales_of_three_shapes_land_on_their_expert_and_projection(tmp_path, source_of):
    """Distinct powers of two: a scale in the wrong place shows in every value."""
    n = 4
    held = {
        "m.gate_up": torch.ones(n, 6, 8).to(torch.float8_e4m3fn),
        "m.gate_up_scale": 2.0 ** torch.arange(2 * n, dtype=torch.float32).reshape(n, 2),
        "m.down": torch.ones(n, 8, 6).to(torch.float8_e4m3fn),
        "m.down_scale": 2.0 ** torch.arange(n, dtype=torch.float32),
        "o.weight": torch.ones(5, 7).to(torch.float8_e4m3fn),
        "o.weight_scale": torch.tensor(0.125),
    }
    save_file(held, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(source_of(tmp_path))
    found = recognise(checkpoint.headers(), FP8).stored
    get = {r: checkpoint.get(p) for r, p in found["m.gate_up"].parts.items()}
    values = fp8.decode(get[""], get["_scale"], found["m.gate_up"].form)
    for e in range(n):
        for p in range(2):
            want = 2.0 ** (2 * e + p)
            assert values[e, 3 * p : 3 * p + 3].unique().tolist() == [want]
            one = fused.scale_of(get["_scale"], experts=n, projections=2, expert=e, projection=p)
            assert one.shape == () and float(one) == want
    down = checkpoint.get("m.down_scale")
    assert found["m.down"].form.layout == fp8.EXPERT
    for e in range(n):
        assert float(fused.scale_of(down, experts=n, projections=1, expert=e, projection=0)) == 2.0**e
        assert fp8.decode(checkpoint.get("m.down"), down, found["m.down"].form)[e].unique().tolist() == [2.0**e]
    whole = checkpoint.get("o.weight_scale")
    assert whole.shape == () and found["o.weight"].form.layout == fp8.TENSOR
    assert float(fused.scale_of(whole, experts=n, projections=2, expert=3, projection=1)) == 0.125


@pytest.mark.parametrize("shape", [(2, 4), (3,), (4, 3), (4, 2, 2)])
def test_r23_a_scale_that_fits_no_expert_is_refused(shape):
    with pytest.raises(Refused, match="for 4 experts of 2 projections"):
        fused.scale_of(torch.ones(shape), experts=4, projections=2, expert=0, projection=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_r25_scale_bytes_stay_bytes(tmp_path, source_of, dtype):
    raw = torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8).repeat(4)
    save_file({"e.down_proj_scales": raw.view(dtype).reshape(2, 12)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(source_of(tmp_path))
    for got in (checkpoint.get("e.down_proj_scales"), checkpoint.slice("e.down_proj_scales", slice(0, 2))):
        assert got.dtype == dtype
        assert torch.equal(got.contiguous().view(torch.uint8).flatten(), raw)


def test_r26_a_shard_is_let_go_before_the_next_is_opened(tmp_path, shards_of, monkeypatch):
    """Forty shards: mapping one while another is mapped fails the test."""
    from dz.weights import safetensors as module

    source = shards_of(tmp_path, [{f"t{n:02d}": torch.full((64,), float(n))} for n in range(40)])
    checkpoint = open_checkpoint(source)
    opened, real = [], torch.UntypedStorage.from_file

    class Storage:
        @staticmethod
        def from_file(path, **kwargs):
            assert checkpoint._storage is None, "the last shard is still mapped"
            opened.append(path)
            return real(path, **kwargs)

    monkeypatch.setattr(module.torch, "UntypedStorage", Storage)
    lazy = iter(checkpoint)
    first = next(lazy)
    assert len(opened) == 1 and first[0] == "t00"
    assert [float(t[0]) for _, t in lazy] == [float(n) for n in range(1, 40)]
    assert len(opened) == 40
