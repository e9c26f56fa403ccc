"""The upstream run: from_pretrained and upstream's own generate, one request at a time, in a process of its own.

Nothing of dz's engine, loader or kernels is in that process, so it is what dz is compared with."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from dz.core import jsonio
from dz.core.messages import Blob
from dz.core.plugins import run_plugins
from dz.core.protocols import Progress
from dz.core.source import Source
from dz.errors import DzError, EnvironmentFailure, Refused

TOP = 20  # alternatives kept at each step


class Case(msgspec.Struct, frozen=True):
    """A prompt as token ids, how many tokens to generate greedily, and the processor's tensors where it has images."""

    id: str
    tokens: list[int]
    max_tokens: int
    media: dict[str, Blob] = {}


class Answer(msgspec.Struct, frozen=True):
    """Upstream's `tokens` (end tokens do not stop it), the `margins` of its best over its second logit at each step,
    and the `top` (token, logprob) pairs of each step, best first. `causal` says whether changing the last prompt token
    left everything before it unchanged (None: not asked). `error` is upstream's own message when the case failed."""

    id: str
    tokens: list[int]
    margins: list[float]
    top: list[list[tuple[int, float]]]
    causal: bool | None = None
    error: str | None = None


class _Order(msgspec.Struct, frozen=True):
    source: dict[str, Any]
    trust: bool
    dtype: str
    plugins: list[str]
    cases: list[Case]


def run(
    source: Source, cases: list[Case], *, trust: bool, dtype: str, plugins: list[str], progress: Progress
) -> dict[str, Answer]:
    """Upstream's answers by case id. Raises EnvironmentFailure when the model does not fit into the host's memory, and
    Refused with upstream's own words when it cannot be loaded."""
    _refuse_too_large(source, dtype)
    order = _Order(jsonio.to_builtins(source), trust, dtype, plugins, cases)
    with tempfile.TemporaryDirectory(prefix="dz-reference-") as folder:
        given, made = Path(folder) / "order", Path(folder) / "answers"
        given.write_bytes(msgspec.msgpack.encode(order))
        progress.start("upstream run", len(cases), "prompts")
        done = subprocess.run(
            [sys.executable, "-m", "dz.upstream.reference", str(given), str(made)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not made.exists():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise Refused(
                f"upstream's own run of {source.name} failed",
                last,
                "run it with transformers alone; the comparison needs it",
                code="reference_failed",
            )
        answers = msgspec.msgpack.decode(made.read_bytes(), type=list[Answer])
        progress.finish(f"{len(answers)} prompts")
    return {a.id: a for a in answers}


def _refuse_too_large(source: Source, dtype: str) -> None:
    from dz import backends

    stored = sum(f.size for f in source.files if f.path.endswith(".safetensors"))
    need = int(stored * (2 if dtype == "float32" else 1) * 1.2)
    free, _ = backends.memory(backends.detect("cpu"))
    if need > free:
        why = f"it needs about {need:,} B in {dtype}, the host has {free:,} B free"
        raise EnvironmentFailure(
            f"the upstream run of {source.name} does not fit",
            why,
            "run it on a larger host, or with --dtype bfloat16",
            code="no_memory",
        )


def main(given: str, made: str) -> int:
    """The child process: load, answer every case, write the answers."""
    order = msgspec.msgpack.decode(Path(given).read_bytes(), type=_Order)
    run_plugins(order.plugins, "reference")
    try:
        source = jsonio.from_builtins(Source, order.source, where="the reference's source")
        model = _load(source, order)
        asked = next((c.id for c in order.cases if len(c.tokens) > 1 and not c.media), None)
        answers = [_answer(model, case, probe=case.id == asked) for case in order.cases]
    except DzError as e:
        print(f"{e.what}: {e.why}", file=sys.stderr)
        return 1
    Path(made).write_bytes(msgspec.msgpack.encode(answers))
    return 0


def _load(source: Source, order: _Order) -> Any:
    from dz.upstream.build import dtype_of
    from dz.upstream.config import architecture

    arch = architecture(source, trust=order.trust)
    model = arch.cls.from_pretrained(source.folder, dtype=dtype_of(order.dtype), local_files_only=True)
    return model.eval()


def _answer(model: Any, case: Case, *, probe: bool) -> Answer:
    import torch

    from dz.upstream.media import unpack

    ids = torch.tensor([case.tokens])
    try:
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                max_new_tokens=case.max_tokens,
                min_new_tokens=None,
                eos_token_id=-1,
                pad_token_id=0,
                repetition_penalty=1.0,
                output_logits=True,
                return_dict_in_generate=True,
                **unpack(case.media),
            )
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as e:
        return Answer(case.id, [], [], [], error=f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")
    rows = torch.stack([row[0].float() for row in out.logits])
    best = torch.log_softmax(rows, -1).topk(min(TOP, rows.shape[-1]), -1)
    pair = rows.topk(2, -1).values
    return Answer(
        case.id,
        out.sequences[0, len(case.tokens) :].tolist(),
        (pair[:, 0] - pair[:, 1]).tolist(),
        [list(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)],
        causal=_causal(model, case.tokens) if probe else None,
    )


def _causal(model: Any, tokens: list[int]) -> bool:
    """Whether upstream's outputs before the last token stay the same when that token changes."""
    import torch

    other = [*tokens[:-1], 1 if tokens[-1] != 1 else 2]
    with torch.inference_mode():
        a, b = (model(input_ids=torch.tensor([t]), use_cache=False).logits[0, :-1].float() for t in (tokens, other))
    return bool(torch.allclose(a, b, atol=1e-4, rtol=1e-4))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
