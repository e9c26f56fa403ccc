"""What upstream's wrapper would hand to its decoder: captured, for prompts with images and without."""

import pytest
import torch

from dz.errors import Refused
from dz.upstream.build import build_meta
from dz.upstream.cache import new_cache
from dz.upstream.decoder import Decoder, Head
from dz.upstream.vision import Wrapper
from dz.upstream.weights import load
from dz.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3", "llava"])
def model(request, tiny, tmp_path_factory):
    folder = tiny.build(request.param, tmp_path_factory.mktemp("vision") / request.param)
    source = tiny.source(folder)
    built, checkpoint = build_meta(source, trust=False, dtype=torch.float32), open_checkpoint(source)
    load(built, checkpoint.headers(), lambda n: checkpoint.get(n).clone(), "cpu")
    decoder = Decoder(built)
    return request.param, folder, built, decoder, Wrapper(built, decoder)


def test_a_captured_prompt_gives_upstreams_logits(model, tiny):
    name, folder, built, decoder, wrapper = model
    upstream = tiny.upstream(folder)
    for case in tiny.images(name):
        ids = torch.tensor([case.tokens])
        prompt = wrapper.prompt(ids, case.media)
        at = prompt.positions if prompt.positions is not None else torch.arange(ids.shape[1])[None]
        with torch.no_grad():
            want = upstream(input_ids=ids, **case.media).logits[0]
            hidden = decoder(cache=new_cache(built.text_config), positions=at, given=prompt.given)
            assert torch.allclose(Head(built)(hidden[0]), want, atol=2e-5)
        assert "cache" not in " ".join(prompt.given)
        assert "past_key_values" not in prompt.given


def test_rows_and_shift(model, tiny):
    """Several axes of positions only where upstream has them; an image takes fewer positions than tokens."""
    name, _, _, _, wrapper = model
    one, two = tiny.images(name)
    first, second = (wrapper.prompt(torch.tensor([c.tokens]), c.media) for c in (one, two))
    if name != "qwen3_vl":
        assert wrapper.rows is None
        assert first.shift is None
        return
    assert wrapper.rows in (None, 3, 4)  # of text alone: upstream's versions differ
    assert first.positions.shape[1:] == (1, len(one.tokens))
    assert first.shift.shape == (first.positions.shape[0], 1, 1)
    # 4 placeholders of a 2 x 2 grid end 2 positions further, 6 of a 2 x 3 grid 3, 2 of a 1 x 2 grid 2
    assert set(first.shift[-3:].flatten().tolist()) == {-2}
    assert set(second.shift[-3:].flatten().tolist()) == {-3}
    again = wrapper.prompt(
        torch.tensor([one.tokens]), one.media
    )  # upstream keeps the last prompt's offset on its model
    assert torch.equal(again.shift, first.shift)


def test_features_without_placeholders(model, tiny):
    name, _, _, _, wrapper = model
    case = tiny.images(name)[0]
    short = [t for i, t in enumerate(case.tokens) if i != case.tokens.index(tiny.IMAGE)]
    media = {k: v[:, : len(short)] if "type_ids" in k else v for k, v in case.media.items()}
    with pytest.raises(Refused) as e:
        wrapper.prompt(torch.tensor([short]), media)
    assert e.value.code == "bad_image"


def test_tensors_that_the_model_does_not_take(model, tiny):
    name, _, _, _, wrapper = model
    case = tiny.images(name)[0]
    with pytest.raises(Refused) as e:
        wrapper.prompt(torch.tensor([case.tokens]), {**case.media, "pixel_values": case.media["pixel_values"][..., :3]})
    assert e.value.code == "bad_image"


def test_a_text_model_has_no_rows(tiny, tmp_path):
    source = tiny.source(tiny.build("llama", tmp_path / "llama"))
    built, checkpoint = build_meta(source, trust=False, dtype=torch.float32), open_checkpoint(source)
    load(built, checkpoint.headers(), checkpoint.get, "cpu")
    assert Wrapper(built, Decoder(built)).rows is None
