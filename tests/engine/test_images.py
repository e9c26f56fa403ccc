"""Requests with images: what they see, beside which others, and what happens when they do not fit."""

import pytest
import torch

NAMES = ["qwen3_vl", "gemma3", "llava"]


@pytest.fixture(params=NAMES)
def model(request, models):
    return models(request.param)


def job(model, helpers, k, id=None, **media):
    case = model.cases[k]
    return (id or str(k), case.tokens, helpers.greedy(12), {**case.media, **media})


def test_other_pixels_give_other_tokens(model, helpers, tiny):
    for k in (4, 5):
        pixels = model.cases[k].media["pixel_values"]
        shown = [pixels, -pixels, pixels]
        jobs = [job(model, helpers, k, str(i), pixel_values=p) for i, p in enumerate(shown)]
        got, _, _ = helpers.drive(model.engine(), jobs)
        assert got["0"] == got["2"] == model.want[k]
        other = tiny.Case(model.cases[k].tokens, {**model.cases[k].media, "pixel_values": -pixels})
        assert got["1"] == tiny.generate(model.folder, [other])[0].tokens != got["0"]


def test_an_image_request_is_preempted(model, helpers):
    """Its prompt is computed again in one piece, from its images, and what it had said is kept."""
    engine = model.engine(chunk=8, block=2, blocks=len(model.cases[5].tokens) // 2 + 9, seqs=3)
    seen = []
    engine.scheduler._on_preempt = lambda seq: (seen.append((seq.id, seq.output)), engine.runner.forget(seq))
    jobs = [job(model, helpers, k) for k in (2, 5, 4)]
    got, _, _ = helpers.drive(engine, jobs, every=2)
    assert {k: got[str(k)] for k in (2, 5, 4)} == {k: model.want[k] for k in (2, 5, 4)}
    assert [(id, n) for id, n in seen if id in "54" and n > 0], seen
    helpers.assert_idle(engine)


def test_images_that_do_not_fit_the_prompt(model, helpers):
    """One placeholder too many: that request is refused in upstream's own words, its neighbours go on."""
    tokens = model.cases[4].tokens
    at = tokens.index(90)
    more = [*tokens[:at], 90, *tokens[at:]]
    media = dict(model.cases[4].media)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in media:
            media[name] = torch.tensor([[int(t == 90) for t in more]])
    engine = model.engine()
    jobs = [job(model, helpers, 1), ("bad", more, helpers.greedy(4), media), job(model, helpers, 5)]
    got, ends, said = helpers.drive(engine, jobs)
    (error,) = [o.error for o in said if o.error]
    assert ends["bad"] == "error"
    assert error[0] == "bad_image"
    assert len(error[1]) > 40
    assert (got["1"], got["5"]) == (model.want[1], model.want[5])
    helpers.assert_idle(engine)


def test_a_prompt_longer_than_the_pool(model, helpers):
    engine = model.engine(block=4, blocks=3)
    got, _, said = helpers.drive(engine, [job(model, helpers, 5), job(model, helpers, 0)])
    assert [o.error[0] for o in said if o.error] == ["too_long"]
    assert got["0"] == model.want[0][:11]
    helpers.assert_idle(engine)


def test_a_prompt_longer_than_a_step_is_not_cut(model, helpers):
    engine = model.engine(chunk=3, block=4)
    works = []
    right = engine.scheduler.next
    engine.scheduler.next = lambda: (batch := right()) and (works.extend(batch.work) or batch)
    got, _, _ = helpers.drive(engine, [job(model, helpers, 5), job(model, helpers, 3)])
    assert (got["5"], got["3"]) == (model.want[5], model.want[3])
    assert [w.count for w in works if w.seq.id == "5" and w.start == 0] == [len(model.cases[5].tokens)]
    assert max(w.count for w in works if w.seq.id == "3") <= 3


def test_prompt_logprobs_of_an_image_prompt(model, helpers, tiny):
    import msgspec

    id, tokens, sampling, media = job(model, helpers, 4)
    sampling = msgspec.structs.replace(sampling, prompt_logprobs=1, logprobs=1)
    got, _, said = helpers.drive(model.engine(chunk=4), [(id, tokens, sampling, media)])
    assert got[id] == model.want[4]
    with torch.no_grad():
        logits = tiny.upstream(model.folder)(input_ids=torch.tensor([tokens]), **media).logits[0]
    table = torch.log_softmax(logits.float(), -1)
    held = said[0].prompt_logprobs
    assert [p.token for p in held[1:]] == tokens[1:]
    want = [float(table[i, t]) for i, t in enumerate(tokens[1:])]
    assert [p.logprob for p in held[1:]] == pytest.approx(want, abs=1e-4)
