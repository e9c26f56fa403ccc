"""What the server and the engine process say to each other: msgpack over two one-way sockets.

Server to engine: Submit, Abort, Stop. Engine to server: Ready once, then Output, Stats and, at the end, Fatal."""

from __future__ import annotations

import msgspec


class Blob(msgspec.Struct, frozen=True):
    """A tensor by value: dtype as torch names it without the prefix ("float32"), shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off. `logprobs` is how many top
    alternatives to return beside the chosen token's own (None: no logprobs at all); `prompt_logprobs` the same for the
    prompt. `seed` makes a request repeatable whatever else runs. `stop_token_ids` come on top of the model's own."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request. `tokens` are final (image placeholders expanded); `media` are the processor's tensors by name."""

    id: str
    tokens: list[int]
    sampling: Sampling
    media: dict[str, Blob] = {}


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests and free what they hold; unknown ids are fine. Each is answered by a final Output."""

    ids: list[str]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish nothing more and exit."""


class Logprob(msgspec.Struct, frozen=True):
    """The natural-log probability of `token`, its rank (1 = most likely), and the `top` alternatives as (id, logprob),
    best first. Computed from the model's logits before penalties and temperature."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Output(msgspec.Struct, frozen=True, tag="output"):
    """New tokens of a request. `finish` is None while it runs, then "stop", "length", "abort" or "error";
    `stop_token` is the id that ended it (not part of `tokens` unless it was asked for by ignore_eos);
    `error` is (code, message): "too_long", "never_fits", "bad_image", "non_finite", "internal"."""

    id: str
    tokens: list[int]
    finish: str | None = None
    stop_token: int | None = None
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    error: tuple[str, str] | None = None
    cached_tokens: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine has loaded. `stages` are (name, seconds) of the cold start; `memory` rows (name, bytes, note);
    `mixers` (kind, layers, tier); `swaps` (site, phase, kernel)."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    max_num_seqs: int
    blocks: int
    block_size: int
    slots: int
    stages: list[tuple[str, float]] = []
    memory: list[tuple[str, int, str]] = []
    mixers: list[tuple[str, int, str]] = []
    swaps: list[tuple[str, str, str]] = []
    ignored: dict[str, int] = {}


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Counters since the start and levels now. `steps` by kind (prefill, decode, mixed); `batch_sizes` counts steps by
    how many sequences they held; `kernel_calls` by "site|op/technique|phase"."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    slots_used: int = 0
    steps: dict[str, int] = {}
    batch_sizes: dict[int, int] = {}
    step_tokens: int = 0
    preemptions: int = 0
    kernel_calls: dict[str, int] = {}


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine ends. `error` are the fields of a DzError (what, why, next, code, exit_code)."""

    what: str
    why: str
    next: str
    code: str
    exit_code: int


ToEngine = Submit | Abort | Stop
FromEngine = Output | Ready | Stats | Fatal
