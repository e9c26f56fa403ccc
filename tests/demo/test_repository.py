"""The demo repository under plain upstream code: what dz is later compared with must itself be right."""

import json

import pytest
import torch
from PIL import Image

TEXT = "def read(path):\n    return open(path).read()  # the whole file, as text\n" * 3
PROMPTS = ["Hello", "What is the capital of France?", TEXT]


def ids_of(processor, text):
    return processor.tokenizer(text, return_tensors="pt").input_ids


def picture(height, width, seed):
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def chat(processor, *parts):
    """The inputs of one user message made of texts and pictures."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )


def greedy(model, inputs, count=24):
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def new_cache(auto, model):
    return auto.DynamicCache(config=model.config)


def steps(model, ids, cache, sizes):
    """Logits of `ids` fed in pieces of the given sizes."""
    out = []
    for piece in ids.split(sizes, dim=1):
        out.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits)
    return torch.cat(out, dim=1)


def test_every_tensor_is_accounted_for(repository, auto):
    for cls in (auto.AutoModelForCausalLM, auto.AutoModelForImageTextToText):
        model, info = cls.from_pretrained(repository, trust_remote_code=True, output_loading_info=True)
        assert not any(info.values())
    state = model.state_dict()
    assert set(json.loads((repository / "model.safetensors.index.json").read_text())["weight_map"]) == set(state)
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 4e6
    packed = model.model.language_model.layers[1].mlp.experts.gate_up_proj_blocks
    assert packed.dtype == torch.uint8 and packed.shape == (8, 128, 4, 16)


def test_base_model_loads_the_same_weights(repository, auto, model):
    base = auto.AutoModel.from_pretrained(repository, trust_remote_code=True)
    assert type(base).__name__ == "AcornModel"
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, model.model.state_dict()[name])


@pytest.mark.parametrize("text", PROMPTS, ids=["short", "question", "code"])
def test_generation_agrees_with_one_full_forward(model, processor, text):
    ids = ids_of(processor, text)
    new = greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 40)
    full = torch.cat((ids, torch.tensor([new])), dim=1)
    logits = model(input_ids=full, use_cache=False).logits[0, ids.shape[1] - 1 : -1]
    assert logits.argmax(-1).tolist() == new
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3, "a margin near rounding would make later comparisons flaky"
    assert len(set(new)) > len(new) // 2, "greedy output repeats itself"


@pytest.mark.parametrize("sizes", [[7, 1, 33, 1, 1, 16, 17], [1] * 76, [75, 1], [3, 73]], ids=str)
def test_pieces_equal_one_shot(model, processor, auto, sizes):
    ids = ids_of(processor, TEXT)[:, : sum(sizes)]
    assert ids.shape[1] == sum(sizes)
    whole = model(input_ids=ids, use_cache=False).logits
    pieces = steps(model, ids, new_cache(auto, model), sizes)
    torch.testing.assert_close(pieces, whole, atol=2e-4, rtol=0)


def test_every_mixer_carries_state(model, processor, auto):
    """Continuing without one layer's cache must show: a dead state would pass every comparison of short prompts."""
    ids = ids_of(processor, TEXT)[:, :60]
    want = steps(model, ids, new_cache(auto, model), [59, 1])[:, -1]
    for i in range(6):
        cache = new_cache(auto, model)
        model(input_ids=ids[:, :59], past_key_values=cache, use_cache=True)
        cache.layers[i] = forget(cache.layers[i])
        got = model(input_ids=ids[:, 59:], past_key_values=cache, use_cache=True).logits[:, -1]
        assert (got - want).abs().max() > 1e-2, f"layer {i} did not use its cache"


def forget(layer):
    """The layer's state with its content lost and its sizes kept."""
    for states in ("recurrent_states", "conv_states"):
        for state in getattr(layer, states, {}).values():
            state.zero_()
    for tensor in ("keys", "values", "indexer_keys"):
        if getattr(layer, tensor, None) is not None:
            getattr(layer, tensor).zero_()
    return layer


def test_top_k_matters_and_position_matters(model, processor):
    ids = ids_of(processor, TEXT)[:, :60]
    want = model(input_ids=ids, use_cache=False).logits[:, -1]
    indexers = [m for m in model.modules() if type(m).__name__ == "AcornIndexer"]
    assert len(indexers) == 2 and all(m.index_topk < 60 for m in indexers)
    for m in indexers:
        m.index_topk = 60
    try:
        dense = model(input_ids=ids, use_cache=False).logits[:, -1]
    finally:
        for m in indexers:
            m.index_topk = 16
    assert (dense - want).abs().max() > 1e-2
    swapped = ids[:, [1, 0, *range(2, 60)]]
    assert (model(input_ids=swapped, use_cache=False).logits[:, -1] - want).abs().max() > 1e-3


def test_chosen_keys_are_causal_and_ties_go_to_the_first(model):
    indexer = next(m for m in model.modules() if type(m).__name__ == "AcornIndexer")
    one = torch.randn(1, 1, 128, generator=torch.Generator().manual_seed(0))
    hidden, resid = one.expand(1, 40, 128), torch.randn(1, 1, 48).expand(1, 40, 48)
    still = (torch.ones(1, 40, 16), torch.zeros(1, 40, 16))  # no rotation: every key is the same
    chosen = indexer(hidden, resid, still, None)[0]
    for row in range(40):
        assert chosen[row].nonzero().flatten().tolist() == list(range(min(row + 1, 16)))


def test_chunks_and_steps_are_one_function(model, auto):
    code = __import__(type(model).__module__, fromlist=["x"])
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 37, 3, d, generator=g) for d in (8, 8, 10))
    k = code.l2norm(k)
    decay = -5 * torch.rand(2, 37, 3, 8, generator=g)
    beta, state = torch.rand(2, 37, 3, generator=g), torch.randn(2, 3, 8, 10, generator=g)
    want, want_state = code.recurrent_gated_delta(q, k, v, decay, beta, state)
    got, got_state = code.chunk_gated_delta(q, k, v, decay, beta, state)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_state, want_state, atol=1e-4, rtol=1e-4)


def test_mxfp4_golden_values(model):
    code = __import__(type(model).__module__, fromlist=["x"])
    blocks = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    out = code.unpack_mxfp4(blocks, torch.tensor([126], dtype=torch.uint8), torch.float32)
    half = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]
    assert out.tolist() == ([*half, *(-x for x in half)]) * 2


def test_padded_batch_equals_single(model, processor):
    tokenizer = processor.tokenizer
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    out = model.generate(**batch, max_new_tokens=12, do_sample=False)[:, batch["input_ids"].shape[1] :]
    for row, text in zip(out, PROMPTS, strict=True):
        ids = ids_of(processor, text)
        alone = greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 12)
        assert row.tolist()[: len(alone)] == alone


def test_dictionary_of_masks_is_used_as_it_is(model, processor, auto):
    ids = ids_of(processor, TEXT)[:, :40]
    decoder = model.get_decoder()
    want = decoder(input_ids=ids, use_cache=False).last_hidden_state
    square = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    kinds = decoder.config.layer_types
    masks = {k: None if k == "linear_attention" else square for k in kinds}
    masks["sliding_attention"] = square & ~square.tril(-24)
    torch.testing.assert_close(decoder(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state, want)
    masks[kinds[1]] = torch.eye(40, dtype=torch.bool)[None, None]
    other = decoder(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state
    assert (other - want).abs().max() > 1e-2


def test_eager_and_sdpa_agree(model, repository, auto, processor):
    ids = ids_of(processor, TEXT)[:, :70]
    eager = auto.AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True, attn_implementation="eager")
    want = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(eager.eval()(input_ids=ids, use_cache=False).logits, want, atol=2e-4, rtol=0)


def test_last_logits_only(model, processor):
    ids = ids_of(processor, TEXT)[:, :20]
    logits = model(input_ids=ids, logits_to_keep=2).logits
    assert logits.shape == (1, 2, 512)
    torch.testing.assert_close(logits, model(input_ids=ids).logits[:, -2:])


def test_images_reach_the_answer(model, processor):
    a, b = picture(40, 70, 1), picture(40, 70, 2)
    one = chat(processor, "What is this? ", a)
    assert one["pixel_values"].shape == (4 * 8, 192) and one["image_grid_hw"].tolist() == [[4, 8]]
    assert (one["input_ids"] == 5).sum() == 8
    answer = greedy(model, one)
    assert answer == greedy(model, chat(processor, "What is this? ", a))
    assert answer != greedy(model, chat(processor, "What is this? ", b))
    assert greedy(model, chat(processor, a, " then ", b)) != greedy(model, chat(processor, b, " then ", a))


def test_an_image_is_more_than_the_sum_of_its_pixels(model):
    """Features depend on where pixels are, and not on the other images of the request."""
    pixels = torch.randn(16 + 24, 192, generator=torch.Generator().manual_seed(3))
    grids = torch.tensor([[4, 4], [4, 6]])
    first, second = model.get_image_features(pixels, grids).pooler_output
    assert first.shape == (4, 128) and second.shape == (6, 128)
    torch.testing.assert_close(model.get_image_features(pixels[16:], grids[1:]).pooler_output[0], second)
    moved = model.get_image_features(pixels[:16].flip(0), grids[:1]).pooler_output[0]
    assert (moved.mean(0) - first.mean(0)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("size", "grid"), [((1, 1), [2, 2]), ((128, 128), [16, 16]), ((30, 900), [2, 16]), ((97, 33), [12, 4])]
)
def test_grids_of_odd_sizes(processor, size, grid):
    out = processor.image_processor(picture(*size, 4), return_tensors="pt")
    assert out["image_grid_hw"].tolist() == [grid] and out["pixel_values"].shape == (grid[0] * grid[1], 192)


def test_patches_are_cut_in_reading_order(processor):
    image = Image.new("RGB", (16, 16))
    image.paste((255, 0, 0), (8, 0, 16, 8))  # the upper right patch
    pixels = processor.image_processor(image, return_tensors="pt", do_resize=False)["pixel_values"]
    assert pixels.shape == (4, 192)
    red = pixels.view(4, 3, 64).mean(-1)
    torch.testing.assert_close(red, torch.tensor([[-2.0, -2, -2], [2, -2, -2], [-2, -2, -2], [-2, -2, -2]]))


def test_a_prompt_that_does_not_fit_its_images_is_refused(model, processor):
    inputs = chat(processor, picture(40, 40, 1))
    with pytest.raises(ValueError, match="image tokens"):
        model(**{**inputs, "input_ids": inputs["input_ids"][:, :-6], "attention_mask": None})
    with pytest.raises(ValueError, match="image"):
        processor(text="<|image|><|image|>", images=[picture(40, 40, 1)], return_tensors="pt")
