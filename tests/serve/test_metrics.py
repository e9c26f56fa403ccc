"""The names that dashboards and clients read."""

import re

FOX = "the quick brown fox"
GAUGES = "vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc dz:blocks_used dz:blocks_total dz:slots_used dz:slots_total"  # noqa: E501
COUNTERS = "vllm:prompt_tokens_total vllm:generation_tokens_total vllm:request_success_total vllm:num_preemptions_total dz:steps_total dz:step_sequences_total dz:step_tokens_total dz:kernel_calls_total"  # noqa: E501
HISTOGRAMS = "time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds request_prompt_tokens request_generation_tokens request_time_per_output_token_seconds request_params_n request_params_max_tokens"  # noqa: E501


def test_every_name_has_samples_and_counts(start):
    served = start(settings={"delay": 0.02})  # all sequences of a request are there at its second step
    text = served.http.get("/metrics").text
    assert "dz:blocks_total" in text
    served.complete(FOX, max_tokens=6)
    served.complete([FOX, FOX], max_tokens=3, n=2, stop="over")
    served.wait(lambda: served.metric("dz:steps_total") >= 9)
    text = served.http.get("/metrics").text
    for name in [*GAUGES.split(), *COUNTERS.split(), *(f"vllm:{h}_bucket" for h in HISTOGRAMS.split())]:
        assert re.search(rf"^{name}{{.*model_name=", text, re.M), name
    assert served.metric("vllm:prompt_tokens_total") == 12
    assert served.metric("vllm:generation_tokens_total") == 6 + 12
    assert served.metric("vllm:request_success_total") == 5
    assert served.metric("vllm:time_to_first_token_seconds_count") == 5
    assert served.metric("vllm:e2e_request_latency_seconds_count") == 5
    assert served.metric("vllm:inter_token_latency_seconds_count") == 5 + 4 * 2
    assert re.search(r'^dz:step_sequences_total{.*size="4"} [1-9]', text, re.M)
    assert re.search(
        r'^dz:kernel_calls_total{.*kernel="rms_norm/torch".*phase="decode".*site="layers.\*.norm"} [1-9]', text, re.M
    )
    assert served.http.head("/metrics").status_code == 200


def test_requests_are_logged_without_their_text(start):
    served = start(config={"log_requests": True})
    served.complete("the lazy dog", max_tokens=2)
    served.wait(lambda: "3 prompt + 2 new tokens" in served.text)
    assert "lazy" not in served.text
