"""`dz serve`: the built-in engine behind an OpenAI-compatible server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dz.cli import output, tables
from dz.cli.audit import show_audit
from dz.cli.common import resolve_settings
from dz.cli.options import (
    BlockSize,
    CpuMemoryUtilization,
    Device,
    Dtype,
    Frozen,
    GpuMemoryUtilization,
    Host,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MaxRestarts,
    Model,
    NumBlocks,
    Plugins,
    Port,
    Recipe,
    Revision,
    Sets,
    TrustRemoteCode,
    Workspace,
)
from dz.cli.progress import size
from dz.core import jsonio
from dz.core.envelope import envelope
from dz.core.plugins import run_plugins
from dz.errors import UsageError
from dz.settings import SPECS, Settings

if TYPE_CHECKING:
    from dz.core.messages import Ready
    from dz.core.source import Source
    from dz.serve.config import Limits, ServeConfig


def _flag(name: str, text: str, *more: str, metavar: str | None = None, hidden: bool = False) -> Any:
    return typer.Option(f"--{name}", *more, help=text, metavar=metavar, show_default=False, hidden=hidden)


# the address and who may use it
Uds = Annotated[str | None, _flag("uds", "Listen on a Unix socket instead of host and port.", metavar="PATH")]
ApiKey = Annotated[list[str] | None, _flag("api-key", "Key that clients must send; repeatable (DZ_API_KEY).")]
MetricsPublic = Annotated[bool, _flag("metrics-public", "Answer /metrics without a key.")]
Origins = Annotated[list[str] | None, _flag("allowed-origins", "Web origin that may call from a browser; repeatable.")]
ServedNames = Annotated[
    list[str] | None, _flag("served-model-name", "Name that clients use for the model; repeatable, the first is shown.")
]
# what is loaded
LoadFormat = Annotated[str, _flag("load-format", "auto, or dummy for random weights (default: auto).")]
LoadOnly = Annotated[bool, _flag("load-only", "Load the model, say what was found, and end.")]
NoPlan = Annotated[bool, _flag("no-plan", "Run upstream's code everywhere; no kernel is swapped in.")]
ChatTemplate = Annotated[Path | None, _flag("chat-template", "Template to use instead of the model's.", metavar="FILE")]
GenerationConfig = Annotated[
    str,
    _flag("generation-config", "Sampling defaults: auto (the model's), none, or a folder.", metavar="auto|none|DIR"),
]
# limits
Queued = Annotated[int, _flag("max-num-queued-reqs", "Requests that may wait; more get 429 (default 0: no limit).")]
MaxBody = Annotated[int | None, _flag("max-body-bytes", "Largest request body (default: 256 MiB).")]
MaxImageBytes = Annotated[int | None, _flag("max-image-bytes", "Largest image as a file (default: 32 MiB).")]
MaxImagePixels = Annotated[int | None, _flag("max-image-pixels", "Most pixels of an image (default: 64 Mi).")]
LimitMm = Annotated[
    str | None, _flag("limit-mm-per-prompt", "Most images in a request (default: 64).", metavar="image=N")
]
# how it runs and ends
DrainTimeout = Annotated[float, _flag("drain-timeout", "Seconds that running requests get at the end (default: 30).")]
EngineTimeout = Annotated[
    float, _flag("engine-timeout", "Seconds of silence after which a busy engine counts as frozen (default: 300).")
]
RequestIds = Annotated[bool, _flag("enable-request-id-headers", "Send X-Request-Id even if the client sent none.")]
LogRequests = Annotated[
    bool, _flag("log-requests", "One line for each request, without its text.", "--enable-log-requests")
]
# names that other servers use
TensorParallel = Annotated[
    int | None, _flag("tensor-parallel-size", "Only 1: one device.", "-tp", "--tp-size", hidden=True)
]
ContextLength = Annotated[str | None, _flag("context-length", "As --max-model-len.", hidden=True)]
MaxRunning = Annotated[int | None, _flag("max-running-requests", "As --max-num-seqs.", hidden=True)]
MemFraction = Annotated[float | None, _flag("mem-fraction-static", "As --gpu-memory-utilization.", hidden=True)]
ChunkedPrefill = Annotated[int | None, _flag("chunked-prefill-size", "As --max-num-batched-tokens.", hidden=True)]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    model: Model,
    host: Host = None,
    port: Port = None,
    uds: Uds = None,
    api_key: ApiKey = None,
    metrics_public: MetricsPublic = False,
    allowed_origins: Origins = None,
    served_model_name: ServedNames = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    dtype: Dtype = None,
    device: Device = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    cpu_memory_utilization: CpuMemoryUtilization = None,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    load_format: LoadFormat = "auto",
    load_only: LoadOnly = False,
    recipe: Recipe = None,
    sets: Sets = None,
    frozen: Frozen = False,
    no_plan: NoPlan = False,
    chat_template: ChatTemplate = None,
    generation_config: GenerationConfig = "auto",
    max_num_queued_reqs: Queued = 0,
    max_body_bytes: MaxBody = None,
    max_image_bytes: MaxImageBytes = None,
    max_image_pixels: MaxImagePixels = None,
    limit_mm_per_prompt: LimitMm = None,
    max_restarts: MaxRestarts = None,
    drain_timeout: DrainTimeout = 30.0,
    engine_timeout: EngineTimeout = 300.0,
    enable_request_id_headers: RequestIds = False,
    log_requests: LogRequests = False,
    plugin: Plugins = None,
    workspace: Workspace = None,
    tensor_parallel_size: TensorParallel = None,
    context_length: ContextLength = None,
    max_running_requests: MaxRunning = None,
    mem_fraction_static: MemFraction = None,
    chunked_prefill_size: ChunkedPrefill = None,
) -> int:
    """Serve a model with an OpenAI-compatible API.

    Examples:
      dz serve org/name                       on http://127.0.0.1:8000
      dz serve ./folder --port 0              on any free port; the line `ready: URL` says which
      dz serve org/name --load-only           load, say what was found, end: 0 if it can be served

    Everything is said on stderr; the last line before requests are answered is `ready: URL`. Ends on Ctrl-C or SIGTERM
    after running requests have finished; a second signal ends it at once."""
    _only_one_device(tensor_parallel_size)
    flags = {
        "host": host, "port": port, "dtype": dtype, "device": device,
        "block_size": block_size, "num_blocks": num_blocks,
        "max_model_len": _either("max-model-len", max_model_len, "context-length", context_length),
        "max_num_seqs": _either("max-num-seqs", max_num_seqs, "max-running-requests", max_running_requests),
        "max_num_batched_tokens": _either(
            "max-num-batched-tokens", max_num_batched_tokens, "chunked-prefill-size", chunked_prefill_size
        ),
        "gpu_memory_utilization": _either(
            "gpu-memory-utilization", gpu_memory_utilization, "mem-fraction-static", mem_fraction_static
        ),
        "cpu_memory_utilization": cpu_memory_utilization, "max_restarts": max_restarts, "workspace": workspace,
    }  # fmt: skip
    settings = resolve_settings(flags)
    run_plugins(list(plugin or ()), "server")  # before upstream is imported: it looks once at what is installed
    source = _source(model, revision, settings, trust=trust_remote_code)
    settings = _with_recipes(source, settings, recipe)
    chosen = {"recipe": recipe, "sets": sets, "frozen": frozen}
    plan = None if no_plan else _plan(source, settings, trust=trust_remote_code, **chosen)
    from dz.serve.config import ServeConfig
    from dz.serve.supervisor import Watch

    config = ServeConfig(
        source=source,
        settings={name: settings.get(name) for name in SPECS},
        plan=plan,
        trust=trust_remote_code,
        plugins=tuple(plugin or ()),
        load_format=_choice("load-format", load_format, ("auto", "dummy")),
        load_only=load_only,
        names=tuple(served_model_name or ()),
        host=settings.get("host"),
        port=settings.get("port"),
        uds=uds,
        api_keys=_keys(api_key),
        metrics_public=metrics_public,
        allowed_origins=tuple(allowed_origins or ()),
        request_id_headers=enable_request_id_headers,
        log_requests=log_requests,
        generation_config=generation_config,
        chat_template=_text(chat_template),
        drain_timeout=drain_timeout,
        max_restarts=settings.get("max_restarts"),
        watch=Watch(silence=engine_timeout, stall=2 * engine_timeout),
        limits=_limits(max_num_queued_reqs, max_body_bytes, max_image_bytes, max_image_pixels, limit_mm_per_prompt),
    )
    return _run(config, model)


def _run(config: ServeConfig, model: str) -> int:
    from dz.serve.launch import serve as run

    show = _Show()
    code = run(config, show)
    if config.load_only and code == 0 and show.ready is not None:
        out = output.get()
        out.document(envelope("load", jsonio.to_builtins(show.ready), inputs={"model": model}))
        out.result("loaded", f"{config.source.name} loads: {show.ready.dtype} on {show.ready.device}")
    return code


class _Show:
    """Tells on stderr what happens."""

    def __init__(self) -> None:
        self.ready: Ready | None = None

    def note(self, text: str) -> None:
        """A line worth reading."""
        output.get().note(text)

    def loaded(self, ready: Ready) -> None:
        """The mixers, the swaps and the limits; memory plan and cold start came from the engine as it loaded."""
        self.ready = ready
        self._table(("MIXER", "LAYERS", "TIER"), ready.mixers)
        self._table(("SWAPPED SITE", "PHASE", "KERNEL"), ready.swaps)
        for name, n in ready.ignored.items():
            self.note(f"not loaded: {name} ({size(n)})")
        self.note(
            f"context {ready.max_model_len} tokens, {ready.max_num_seqs} sequences in a step, {ready.blocks} blocks of "
            f"{ready.block_size} tokens, {ready.slots} state slots, {ready.dtype} on {ready.device}"
        )

    def _table(self, columns: tuple[str, ...], rows: list[Any]) -> None:
        if rows:
            self.note(tables.render(columns, rows, width=None, color=False).rstrip("\n"))


def _source(model: str, revision: str | None, settings: Settings, *, trust: bool) -> Source:
    from dz import hub

    name, base = model if revision is None else f"{model}@{revision}", Path(settings.get("workspace")).absolute()
    source = hub.resolve(name, workspace=base, trust=trust)
    show_audit(source, trust=trust, workspace=base)
    return source


def _with_recipes(source: Source, settings: Settings, recipe: str | None) -> Settings:
    """What the model's recipes say about settings; a requirement that a flag breaks is said."""
    from dz.adapt import recipes
    from dz.upstream.config import raw_config

    kind = str(raw_config(source).get("model_type", ""))
    settings, broken = recipes.apply(settings, recipes.chain(kind, recipe))
    for line in broken:
        output.get().warn(line)
    return settings


def _plan(
    source: Source, settings: Settings, *, trust: bool, recipe: str | None, sets: list[str] | None, frozen: bool
) -> dict[str, Any]:
    from dz import adapt

    plan = adapt.current_plan(
        source,
        trust=trust,
        device=settings.get("device"),
        settings=settings,
        recipe=recipe,
        sets=sets,
        frozen=frozen,
        progress=output.get().progress(),
    )
    return jsonio.to_builtins(plan)


def _keys(given: list[str] | None) -> tuple[str, ...]:
    """The keys of the command line, else the one of DZ_API_KEY."""
    from_env = os.environ.get("DZ_API_KEY")
    keys = tuple(given or ([from_env] if from_env else ()))
    if not all(keys):
        raise UsageError(
            "an empty --api-key", "anybody could send it", "leave the flag out, or give a key", code="bad_key"
        )
    return keys


def _limits(
    queued: int, body: int | None, image_bytes: int | None, pixels: int | None, per_prompt: str | None
) -> Limits:
    from dz.serve.config import ImageLimits, Limits

    images = {"bytes": image_bytes, "pixels": pixels, "count": _image_count(per_prompt)}
    limits = {"queued": queued, "body": body}
    return Limits(
        images=ImageLimits(**{k: v for k, v in images.items() if v is not None}),
        **{k: v for k, v in limits.items() if v is not None},
    )


def _image_count(text: str | None) -> int | None:
    """N of `image=N`, or of {"image": N}."""
    if text is None:
        return None
    try:
        if text.lstrip().startswith("{"):
            table = json.loads(text)
        else:
            table = dict(pair.split("=", 1) for pair in text.split(","))
        count = int(table.pop("image"))
        if table or count < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        what = f"--limit-mm-per-prompt {text}"
        raise UsageError(what, "only images have a limit", "write it as image=4", code="bad_limit") from None
    return count


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not a text", str(e), "name a Jinja file", code="bad_template") from e


def _either(name: str, value: Any, other: str, given: Any) -> Any:
    """A setting under its own name or under the one that another server uses, with a hint for the latter."""
    if given is None:
        return value
    if value is not None:
        raise UsageError(f"--{name} and --{other} together", "they mean the same", f"keep --{name}", code="conflict")
    output.get().note(f"note: --{other} is --{name} here")
    return given


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(
            f"--{name} {value}", f"it is one of {', '.join(choices)}", "dz serve --help", code="bad_choice"
        )
    return value


def _only_one_device(count: int | None) -> None:
    if count not in (None, 1):
        what = f"--tensor-parallel-size {count}"
        raise UsageError(what, "this engine runs on one device", "leave the flag out", code="one_device")
