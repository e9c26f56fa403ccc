"""What server and engine say to each other survives the wire."""

import msgspec
import pytest

from dz.core.messages import (
    Abort,
    Blob,
    Fatal,
    FromEngine,
    Logprob,
    Output,
    Ready,
    Sampling,
    Stats,
    Stop,
    Submit,
    ToEngine,
)

TO = [
    Submit(
        id="a",
        tokens=[1, 2],
        sampling=Sampling(max_tokens=4, logit_bias={3: -1.5}, stop_token_ids=(7,), logprobs=0),
        media={"pixels": Blob("float32", (1, 2), b"\0" * 8)},
    ),
    Abort(["a", "b"]),
    Stop(),
]
FROM = [
    Output(
        "a",
        [5],
        finish="stop",
        stop_token=2,
        logprobs=[Logprob(5, -0.25, 1, [(5, -0.25)])],
        prompt_logprobs=[None],
        error=("internal", "x"),
    ),
    Ready(64, 100, [2], "float32", "cpu", 4, 10, 16, 2, stages=[("load", 0.5)], memory=[("weights", 10, "")]),
    Stats(steps={"mixed": 2}, batch_sizes={4: 1}, kernel_calls={"s|rms_norm/torch|decode": 3}),
    Fatal("what", "why", "next", "code", 3),
]


@pytest.mark.parametrize("message", TO + FROM, ids=lambda m: type(m).__name__)
def test_round_trip(message):
    kind = ToEngine if message in TO else FromEngine
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Stop()), type=FromEngine)
