"""Each check passes on a right server and fails, with the right words, on each fault it is there for."""

import math

import pytest

from dz.accept.check import discover
from dz.accept.checks import batch_invariance, concurrency, degenerate, image, long_context, recovery, startup, text
from dz.errors import EnvironmentFailure, Refused

TEXT = text.Params(prompts=5, tokens=12)


def test_every_file_is_a_check():
    found = discover()
    assert set(found) == {
        *("integrity", "load", "startup", "text", "batch_invariance"),
        *("image", "long_context", "concurrency", "degenerate", "recovery"),
    }
    for check in found.values():
        assert check.summary.endswith(".") and check.params() == check.params()


class TestText:
    def test_a_right_server(self, context):
        result = text.run(context(), TEXT)
        assert result.status == "pass" and result.value == 1.0
        assert result.n >= 45 and result.details["distributions"]["kl_mean"] < 1e-12
        assert result.details["causality"]["causal"] and "5 of 5 answers exact" in result.reason

    def test_the_end_of_a_text_is_compared(self, context, oracle):
        """Some toy answers end with the end token, so that the clean run above has seen both kinds of ending."""
        golden = oracle()
        text.run(context(golden=golden), text.Params(prompts=12, tokens=40))
        ended = [golden._answer(c, d).stop_token for c, d in golden.asked]
        assert set(ended) == {None, 2}

    @pytest.mark.parametrize(
        ("faults", "words"),
        [
            ({"wrong_token": 4}, "token 4: "),
            ({"wrong_token": 0}, "token 0: "),
            ({"shifted": 1}, "the server's prompt differs from upstream's: token 0"),
            ({"sharper": 1.3}, "mean KL"),
            ({"loop": 1}, "token 2: "),
        ],
    )
    def test_faults(self, context, faults, words):
        result = text.run(context(faults), TEXT)
        assert result.status == "fail" and words in result.reason

    def test_a_stop_token_may_be_shown(self, context):
        assert text.run(context({"shows_end": 1}), text.Params(prompts=12, tokens=40)).status == "pass"

    def test_a_wrong_finish_reason(self, context):
        result = text.run(context({"wrong_finish": 1}), text.Params(prompts=12, tokens=40))
        assert result.status == "fail" and "finish reason 'length' instead of 'stop'" in result.reason

    def test_near_ties_are_no_errors(self, context, oracle, monkeypatch):
        """The same wrong token is a tie where upstream's margin says so."""
        golden = oracle()
        right = golden._answer

        def near(case, dtype):
            answer = right(case, dtype)
            return type(answer)(
                **{f: getattr(answer, f) for f in answer.__struct_fields__} | {"margins": [5e-4] * len(answer.margins)}
            )

        monkeypatch.setattr(golden, "_answer", near)
        result = text.run(context({"wrong_token": 4}, golden=golden), TEXT)
        assert (
            result.status == "pass" and result.details["tokens"]["ties"] == 5 and "5 part at near ties" in result.reason
        )

    def test_what_is_not_causal_is_not_golden(self, context, oracle):
        with pytest.raises(Refused, match="cannot be golden"):
            text.run(context(golden=oracle(looks_ahead=True)), TEXT)

    def test_upstream_that_fails_is_told(self, context, oracle):
        with pytest.raises(Refused, match="fails on prompt1") as e:
            text.run(context(golden=oracle(refuses=["prompt1"])), TEXT)
        assert "not like this" in e.value.why

    @pytest.mark.parametrize(("sharper", "status"), [(1.02, "pass"), (1.5, "fail")])
    def test_low_precision_is_measured_against_upstreams_own(self, context, oracle, sharper, status):
        """Upstream in bfloat16 is 1.01 times as sharp as in float32: a server may be about that far off, not more."""
        golden = oracle(low={"bfloat16": 1.01})
        ctx = context({"sharper": sharper}, golden=golden, dtype="bfloat16")
        result = text.run(ctx, text.Params(prompts=4, tokens=12, noise=5))
        assert result.status == status
        assert {d for _, d in golden.asked} == {"float32", "bfloat16"}
        assert result.details["limits"]["max_kl"] > 1e-5 and result.details["limits"]["shift"] > 0

    def test_without_a_tokenizer_ids_are_sent(self, context, oracle):
        ctx = context(golden=oracle(tokenizer="none here", chat="none"))
        assert text.run(ctx, TEXT).status == "pass"


class TestImage:
    def test_a_right_server(self, context):
        result = image.run(context(), image.Params(tokens=6))
        assert result.status == "pass" and "12 of 12 answers exact" in result.reason

    @pytest.mark.parametrize(
        ("faults", "words"),
        [({"sorted_pictures": 1}, "two alone"), ({"cut_pictures": 1}, "one alone"), ({"wrong_token": 2}, "token 2")],
    )
    def test_faults(self, context, faults, words):
        result = image.run(context(faults), image.Params(tokens=6))
        assert result.status == "fail" and words in " ".join(result.details["faults"])

    def test_no_vision(self, context, oracle):
        result = image.run(context(golden=oracle(images=False, vision="not for pictures")), image.Params())
        assert result.status == "skip" and not result.required

    def test_a_missing_processor_is_no_excuse(self, context, oracle):
        result = image.run(context(golden=oracle(vision="needs torchvision")), image.Params())
        assert result.status == "skip" and result.required and "torchvision" in result.reason

    def test_what_upstream_refuses_is_named(self, context, oracle):
        result = image.run(context(golden=oracle(refuses=["two", "swapped"])), image.Params(tokens=4))
        assert result.status == "pass" and "upstream itself refuses two, swapped" in result.reason and result.n == 32
        everything = ["one", "another", "alone", "two", "swapped", "behind"]
        with pytest.raises(Refused, match="none of the picture cases"):
            image.run(context(golden=oracle(refuses=everything)), image.Params())


class TestLongContext:
    PARAMS = long_context.Params(first=32, factor=3, tokens=4, reference_up_to=300)

    def test_a_right_server(self, context):
        result = long_context.run(context(), self.PARAMS)
        assert result.status == "pass" and (result.value, result.threshold) == (596, 596)
        how = {r["length"]: r["how"] for r in result.details["rungs"]}
        assert how == {32: "upstream", 96: "upstream", 288: "upstream", 596: "finite"}

    @pytest.mark.parametrize(
        ("faults", "words"),
        [
            ({"broken_from": 250}, "the first length that fails is 288: /v1/completions answers 500"),
            ({"wild_from": 400}, "the first length that fails is 596: log probabilities are not finite"),
            ({"wrong_token": 2}, "the first length that fails is 32: token 2"),
            ({"no_limit": 1}, "601 tokens is answered though the limit is 600"),
            ({"vague_limit": 1}, "does not state the limit"),
        ],
    )
    def test_faults(self, context, faults, words):
        result = long_context.run(context(faults), self.PARAMS)
        assert result.status == "fail" and words in result.reason

    def test_a_broken_off_ladder_is_no_pass(self, context):
        params = long_context.Params(first=32, factor=3, tokens=4, seconds=1e-6)
        result = long_context.run(context(), params)
        assert result.status == "skip" and result.required and "raise `seconds`" in result.reason and result.value == 32

    def test_up_to_is_the_goal(self, context):
        result = long_context.run(context({"broken_from": 250}), long_context.Params(up_to=200, tokens=4))
        assert result.status == "pass" and result.value == 196

    def test_without_upstream_lengths_are_still_run(self, context, oracle):
        golden = oracle(problem=EnvironmentFailure("does not fit", "9 B", "-", code="no_memory"))
        result = long_context.run(context(golden=golden), self.PARAMS)
        assert result.status == "pass" and "0 of them against upstream; does not fit: 9 B" in result.reason

    @pytest.mark.parametrize(
        ("args", "want"), [((4, 4, 70), [4, 16, 64, 70]), ((8, 2, 8), [8]), ((8, 1, 20), [8, 16, 20]), ((8, 4, 5), [5])]
    )
    def test_ladder(self, args, want):
        assert long_context.ladder(*args) == want


class TestBatchInvariance:
    PARAMS = batch_invariance.Params(prompts=4, tokens=8)

    def test_a_right_server(self, context):
        result = batch_invariance.run(context(), self.PARAMS)
        assert result.status == "pass" and result.n == 8

    def test_answers_that_depend_on_the_neighbours(self, context):
        result = batch_invariance.run(context({"batched": 1}), self.PARAMS)
        assert result.status == "fail" and "token 3" in result.reason and result.value >= 4


class TestConcurrency:
    PARAMS = concurrency.Params(levels=[1, 3], requests=4, tokens=8)

    def test_a_right_server(self, context):
        result = concurrency.run(context(), self.PARAMS)
        assert result.status == "pass" and result.value > 0
        one, three = result.details["levels"]
        assert one["shared_steps"] == 0 and one["largest_step"] == 1
        assert three["shared_steps"] > 0 and 2 <= three["largest_step"] <= 3

    @pytest.mark.parametrize(
        ("faults", "words"),
        [
            ({"unshared": 1}, "no step held two sequences"),
            ({"batched": 1}, "at 3: token 3"),
            ({"leak": 1}, "dz:blocks_used is"),
        ],
    )
    def test_faults(self, context, faults, words, monkeypatch):
        monkeypatch.setattr(concurrency, "SETTLE", 0.2)
        result = concurrency.run(context(faults), self.PARAMS)
        assert result.status == "fail" and words in result.reason

    def test_a_foreign_server_without_metrics(self, context):
        result = concurrency.run(context({"no_metrics": 1}), self.PARAMS)
        assert result.status == "pass" and result.details["levels"][0]["shared_steps"] is None


class TestDegenerate:
    PARAMS = degenerate.Params(prompts=3, tokens=24)

    def test_a_right_server_is_not_compared(self, context, oracle):
        golden = oracle()
        result = degenerate.run(context(golden=golden), self.PARAMS)
        assert result.status == "pass" and golden.asked == []

    def test_a_loop_that_upstream_does_not_have(self, context):
        result = degenerate.run(context({"loop": 1}), self.PARAMS)
        assert result.status == "fail" and result.value == 3 and "a loop of 1 tokens" in result.reason

    def test_a_loop_that_upstream_has_too(self, context, oracle, monkeypatch):
        golden = oracle()
        right = golden._answer
        monkeypatch.setattr(
            golden, "_answer", lambda c, d: type(a := right(c, d))(id=a.id, prompt=a.prompt, tokens=[9] * 24)
        )
        result = degenerate.run(context({"loop": 1}, golden=golden), self.PARAMS)
        assert result.status == "pass" and "3 collapse as upstream's own do" in result.reason

    def test_without_upstream_a_loop_counts(self, context, oracle):
        golden = oracle(problem=EnvironmentFailure("does not fit", "9 B", "-"))
        result = degenerate.run(context({"loop": 1}, golden=golden), self.PARAMS)
        assert result.status == "fail" and "upstream could not be asked: does not fit" in result.reason


class TestStartup:
    def test_a_given_server(self, context):
        result = startup.run(context(), startup.Params())
        assert result.status == "pass" and result.details["ready_seconds"] is None and result.n == 4

    def test_slow(self, context):
        result = startup.run(context({"slow": 0.15}), startup.Params(first_token_seconds=0.1, repeats=1))
        assert result.status == "fail" and "the first token took" in result.reason and result.value > 0.15

    def test_slow_to_start(self, context):
        result = startup.run(context(process=True), startup.Params(ready_seconds=1e-3, repeats=0))
        assert result.status == "fail" and result.reason.startswith("ready after") and result.value > 1e-3


class TestRecovery:
    PARAMS = recovery.Params(error_seconds=2, health_seconds=1, restart_seconds=5)

    def test_a_right_server(self, context):
        result = recovery.run(context(process=True), self.PARAMS)
        assert result.status == "pass" and result.value < 2
        assert "the engine has ended" in result.details["said"] and result.details["restart_seconds"] > 0.1

    @pytest.mark.parametrize(
        ("faults", "words"),
        [
            ({"deaf": 1}, "the open request had no end after 2 s"),
            ({"well": 1}, "/health still said 200 after 1 s"),
            ({"gone": 1}, "/health did not come back within 1 s"),
            ({"changed": 1}, "after the restart the answer differs: token 1"),
        ],
    )
    def test_faults(self, context, faults, words):
        params = recovery.Params(error_seconds=2, health_seconds=1, restart_seconds=1 if "gone" in faults else 5)
        result = recovery.run(context(faults, process=True), params)
        assert result.status == "fail" and words in result.reason

    def test_only_a_server_of_our_own(self, context):
        assert recovery.run(context(), self.PARAMS).status == "skip"


def test_statistics_are_plain_json(context):
    result = text.run(context(), TEXT)
    assert all(math.isfinite(v) for v in result.details["distributions"].values())
