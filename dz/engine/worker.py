"""The engine process: `python -m dz.engine.worker`, one EngineSpec on the first line of standard input."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import msgspec
import zmq

from dz.core import jsonio
from dz.core.messages import Abort, Fatal, FromEngine, Output, Ready, Stop, Submit, ToEngine
from dz.core.plan import Plan
from dz.core.plugins import run_plugins
from dz.core.source import Source
from dz.engine.config import EngineSpec
from dz.errors import DzError, EnvironmentFailure, explain

STATS_EVERY = 0.5  # seconds; also the heartbeat by which the server knows a frozen engine
IDLE_WAIT = 200  # milliseconds


def main() -> int:
    """Load, report Ready, then serve until Stop or until the server is gone. Exit codes are those of the command
    line."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSpec)
    link = _Link(spec)
    try:
        worker = _Worker(spec, link)
        worker.load()
        worker.run()
    except KeyboardInterrupt:
        return 130
    except ServerGone:
        link.close()
        return 0
    except Exception as e:  # noqa: BLE001  the last stop of this process: whatever ended it is told to the server
        known = explain(e)
        if known is None:
            import traceback

            traceback.print_exc()
            known = DzError(
                "the engine failed",
                f"{type(e).__name__}: {e}",
                "see the log above; report it with the command",
                code="internal",
            )
        with suppress(ServerGone):
            link.send(Fatal(known.what, known.why, known.next, known.code, known.exit_code))
        link.close()
        return known.exit_code
    link.close()
    return 0


class ServerGone(Exception):
    """The process that started this one has ended: nobody is there to be told anything."""


class _Link:
    """Two one-way sockets to the server."""

    def __init__(self, spec: EngineSpec) -> None:
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.outbox = self.context.socket(zmq.PUSH)
        self.inbox.connect(spec.inbox)
        self.outbox.connect(spec.outbox)
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._server = os.getppid()

    def send(self, message: FromEngine) -> None:
        """Hand a message to the server; waits while it does not listen. Raises ServerGone when it lives no more."""
        while not self.outbox.poll(IDLE_WAIT, zmq.POLLOUT):
            if self.orphaned:
                raise ServerGone
        self.outbox.send(self._encode(message), zmq.NOBLOCK)

    def receive(self, wait: int) -> list[Any]:
        """Everything that has arrived, after waiting at most `wait` milliseconds for the first."""
        out = []
        while self.inbox.poll(wait if not out else 0):
            out.append(self._decode(self.inbox.recv()))
        return out

    @property
    def orphaned(self) -> bool:
        """Whether the server that started this process is gone."""
        return os.getppid() != self._server

    def close(self) -> None:
        """Let what was sent arrive, then close."""
        self.outbox.close(linger=0 if self.orphaned else 2000)
        self.inbox.close(linger=0)
        self.context.term()


class _Worker:
    def __init__(self, spec: EngineSpec, link: _Link) -> None:
        self.spec, self.link = spec, link
        self.source = jsonio.from_builtins(Source, spec.source, where="the engine's source")
        self.plan = jsonio.from_builtins(Plan, spec.plan, where="the engine's plan") if spec.plan else None

    def load(self) -> None:
        """Load the model and say Ready."""
        import torch

        run_plugins(self.spec.plugins, "engine")
        from dz.engine.engine import Engine
        from dz.engine.loader import load
        from dz.upstream.vocabulary import eos_token_ids

        s = self.spec.settings
        device, budget = _device(s)
        if device == "cpu":
            torch.set_num_threads(
                max(1, len(os.sched_getaffinity(0))) if "OMP_NUM_THREADS" not in os.environ else torch.get_num_threads()
            )
        loaded = load(
            self.source,
            self.plan,
            _wishes(s, device, budget, self.spec, self.plan),
            trust=self.spec.trust,
            bind=_bind,
            tell=_tell,
        )
        eos = {
            *eos_token_ids(self.source),
            *map(int, s.get("eos_token_ids", ())),
        }  # the tokenizer's come from the server
        self.engine = Engine(
            loaded.runner, loaded.limits, eos=frozenset(eos), vocab=loaded.vocab, kernel_calls=loaded.calls
        )
        swaps = [
            (site.site, phase, c.impl)
            for site in (self.plan.swaps() if self.plan else ())
            for phase, c in site.phases.items()
            if c.impl != "upstream"
        ]
        self.link.send(
            Ready(
                max_model_len=loaded.limits.max_model_len,
                vocab_size=loaded.vocab,
                eos_token_ids=sorted(eos),
                dtype=str(loaded.built.dtype).removeprefix("torch."),
                device=device,
                max_num_seqs=loaded.limits.max_num_seqs,
                blocks=loaded.limits.blocks,
                block_size=loaded.limits.block_size,
                slots=loaded.limits.slots,
                stages=loaded.stages,
                memory=[(r.name, r.bytes, r.note) for r in loaded.memory],
                mixers=[("mixers", loaded.runner.taps.count, loaded.tier.name)],
                swaps=swaps,
                ignored=loaded.coverage.ignored,
            )
        )

    def run(self) -> None:
        """Steps while there is work, short waits while there is none."""
        told = 0.0
        while not self.link.orphaned:
            for message in self.link.receive(0 if not self.engine.idle else IDLE_WAIT):
                if isinstance(message, Stop):
                    return
                self._take(message)
            worked = not self.engine.idle
            for output in self.engine.step():
                self.link.send(output)
            if (worked and self.engine.idle) or time.monotonic() - told > STATS_EVERY:
                self.link.send(self.engine.stats())
                told = time.monotonic()

    def _take(self, message: Submit | Abort) -> None:
        if isinstance(message, Abort):
            self.engine.abort(message.ids)
            return
        from dz.upstream.media import unpack

        try:
            media = unpack(message.media)
        except DzError as e:
            self.link.send(Output(message.id, [], finish="error", error=(e.code, e.what)))
            return
        self.engine.submit(message.id, message.tokens, message.sampling, media)


def _device(settings: dict[str, Any]) -> tuple[str, int]:
    """The torch device and the bytes that dz may use on it."""
    from dz import backends

    device = backends.detect(str(settings.get("device", "auto")))
    if not backends.here(device):
        raise EnvironmentFailure(
            f"the device {device.spec} is not here",
            "it can be planned for, not served on",
            "dz doctor",
            code="no_device",
        )
    free, total = backends.memory(device)
    if device.kind == "cpu":
        return "cpu", int(free * float(settings.get("cpu_memory_utilization", 0.5)))
    share = float(settings.get("gpu_memory_utilization", 0.9))
    return ("cuda" if device.kind in ("cuda", "rocm") else device.kind), int(max(0, total * share - (total - free)))


def _wishes(s: dict[str, Any], device: str, budget: int, spec: EngineSpec, plan: Plan | None) -> Any:
    from dz.engine.loader import Wishes

    return Wishes(
        dtype=str(s.get("dtype", "auto")),
        max_model_len=int(s.get("max_model_len", 0)),
        max_num_seqs=int(s.get("max_num_seqs", 16)),
        max_num_batched_tokens=int(s.get("max_num_batched_tokens", 2048)),
        block_size=int(s.get("block_size", 16)),
        num_blocks=int(s.get("num_blocks", 0)),
        device=device,
        budget=budget,
        load_format=spec.load_format,
        ignore=plan.ignore_unexpected if plan else (),
    )


def _bind(model: Any, plan: Plan, phase: Callable[[], str]) -> AbstractContextManager[Any]:
    from dz.core.registry import Registry
    from dz.swap import bind

    return bind(model, plan, Registry.discover(), phase, tell=_tell)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
