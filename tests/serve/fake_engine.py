"""An engine worker without a model: it speaks the protocol and "generates" the prompt's own tokens, in order.

Behaviour comes from the settings: `delay` seconds per token, `chunk` tokens per message, `load` seconds of loading,
`fatal` a Fatal's fields, `die_loading` an exit code (both after `good_loads`, counted in the file `pids`), limits.
`deaf`: requests get lost. `gibberish`: they are answered by nonsense.
A request's seed commands it: 666 exit at the second token, 667 SIGSTOP itself, 668 to 670 errors.
The last `end` token of a prompt ends its text."""

import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from dz.core.messages import Abort, Fatal, Logprob, Output, Ready, Stats, Stop, Submit, ToEngine
from dz.engine.config import EngineSpec

spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSpec)
S = spec.settings
context = zmq.Context()
inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
inbox.connect(spec.inbox)
outbox.connect(spec.outbox)
say = lambda m: outbox.send(msgspec.msgpack.encode(m))  # noqa: E731
VOCAB, END = S.get("vocab", 2000), S.get("end", [1])
if S.get("pids"):
    with Path(S["pids"]).open("a") as f:
        f.write(f"{os.getpid()}\n")
loads = len(Path(S["pids"]).read_text().split()) if S.get("pids") else 1

time.sleep(S.get("load", 0))
if "die_loading" in S and loads > S.get("good_loads", 0):
    sys.exit(S["die_loading"])
if "fatal" in S and loads > S.get("good_loads", 0):
    say(Fatal(*S["fatal"]))
    outbox.close(linger=1000)
    sys.exit(S["fatal"][-1])
say(
    Ready(
        max_model_len=S.get("max_model_len", 512), vocab_size=VOCAB, eos_token_ids=END, dtype="float32", device="cpu",
        max_num_seqs=S.get("max_num_seqs", 4), blocks=100, block_size=16, slots=8, stages=[("weights", 0.5)],
        memory=[("weights", 1 << 20, "note")], mixers=[("attention", 2, "gather")],
        swaps=[("layers.*.norm", "decode", "rms_norm/torch")],
    )
)  # fmt: skip


def logprob(token, i, n):
    """Deterministic: the chosen token is the best in even steps, the second best in odd ones."""
    own = -0.25 - (token * 7919 % 1000) / 10_000
    others = [((token + 1 + k) % VOCAB, own - 0.5 - k) for k in range(n)]
    if i % 2 and n:
        best = ((token + 500) % VOCAB, own + 0.125)
        return Logprob(token, own, 2, [best, (token, own), *others][:n])
    return Logprob(token, own, 1, [(token, own), *others][:n])


running, seen, steps, sizes = {}, [], {"decode": 0, "prefill": 0}, {}
told = 0.0


def stats():
    return Stats(
        running=min(len(running), S.get("max_num_seqs", 4)), waiting=max(0, len(running) - S.get("max_num_seqs", 4)),
        blocks_used=len(running), slots_used=len(running), steps=dict(steps), batch_sizes=dict(sizes),
        step_tokens=sum(k * v for k, v in sizes.items()),
        kernel_calls={"layers.*.norm|rms_norm/torch|decode": steps["decode"]},
    )  # fmt: skip


def submit(m):
    if S.get("record"):
        with Path(S["record"]).open("ab") as f:
            f.write(
                msgspec.json.encode(
                    {
                        "id": m.id,
                        "tokens": m.tokens,
                        "sampling": m.sampling,
                        "media": {k: [b.dtype, b.shape] for k, b in m.media.items()},
                    }
                )
                + b"\n"
            )
    error = {
        668: ("internal", "secret /path/in/engine"),
        669: ("bad_image", "the image is bad"),
        670: ("non_finite", "nan"),
    }.get(m.sampling.seed)
    if error:
        say(Output(m.id, [], finish="error", error=error))
        return
    want = m.sampling.prompt_logprobs
    first = None
    if want is not None:
        first = [None, *[logprob(t, i, want) for i, t in enumerate(m.tokens[1:])]]
    running[m.id] = (m, deque(m.tokens), [0], first)
    steps["prefill"] += 1


def step():
    sizes[len(running)] = sizes.get(len(running), 0) + 1
    steps["decode"] += 1
    for id, (m, todo, count, first) in list(running.items()):
        p, out, lps, finish, stop = m.sampling, [], [], None, None
        for _ in range(S.get("chunk", 1)):
            token = todo.popleft()
            todo.append(token)
            if token in (*p.stop_token_ids, *(() if p.ignore_eos else END)) and count[0] >= p.min_tokens:
                finish, stop = "stop", token
                break
            out.append(token)
            if p.logprobs is not None:
                lps.append(logprob(token, count[0], p.logprobs))
            count[0] += 1
            if p.seed == 666 and count[0] == 2:
                os._exit(9)
            if p.seed == 667:
                os.kill(os.getpid(), signal.SIGSTOP)
            if count[0] >= p.max_tokens:
                finish = "length"
                break
        say(
            Output(
                id,
                out,
                finish=finish,
                stop_token=stop,
                logprobs=lps if p.logprobs is not None else None,
                prompt_logprobs=first,
            )
        )
        running[id] = (m, todo, count, None)
        if finish:
            del running[id]


while True:
    while inbox.poll(0 if running else 50):
        m = msgspec.msgpack.decode(inbox.recv(), type=ToEngine)
        if isinstance(m, Submit) and S.get("gibberish"):
            outbox.send(b"\xc1 no msgpack")
        elif isinstance(m, Submit) and not S.get("deaf"):
            submit(m)
        elif isinstance(m, Abort):
            if S.get("aborts"):
                with Path(S["aborts"]).open("a") as f:
                    f.write("".join(f"{i}\n" for i in m.ids))
            for i in m.ids:
                if running.pop(i, None):
                    say(Output(i, [], finish="abort"))
        elif isinstance(m, Stop):
            sys.exit(0)
    if running:
        time.sleep(S.get("delay", 0))
        step()
    if time.monotonic() - told > 0.1:
        told = time.monotonic()
        say(stats())
