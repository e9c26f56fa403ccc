"""What the routes share: engine, tokenizer, metrics, and the rules for taking a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from dz.core.messages import Ready
from dz.errors import DzError
from dz.serve import sampling
from dz.serve.config import ServeConfig
from dz.serve.errors import ApiError, bad, from_dz, unavailable
from dz.serve.job import Job
from dz.serve.metrics import Metrics
from dz.serve.supervisor import Supervisor
from dz.upstream.processing import Processor

log = logging.getLogger("dz.serve")
P = ParamSpec("P")
R = TypeVar("R")
SHORT_TEXT = 65536  # characters that are never worth counting


class Server:
    """One served model. `processor` is None until it is loaded."""

    def __init__(self, config: ServeConfig, engine: Supervisor) -> None:
        self.config, self.engine = config, engine
        self.names = config.served_names
        self.metrics = Metrics(self.names[0], engine)
        self.defaults = sampling.defaults(config.source, config.generation_config)
        self.processor: Processor | None = None
        self.jobs: set[Job] = set()
        self.draining = False
        self.created = int(time.time())
        self.thread = ThreadPoolExecutor(1, "dz-encode")  # upstream's encoding is not safe in two threads

    def tokenizer(self) -> Processor:
        """The processor. Raises ApiError 503 while it loads."""
        if self.processor is None:
            raise unavailable("the tokenizer is loading")
        return self.processor

    def limits(self) -> Ready:
        """What the engine said when it was ready. Raises ApiError 503 when it is not, or the server is going down."""
        if self.draining:
            raise unavailable("the server is shutting down")
        self.engine.check()
        if self.engine.ready is None:
            raise unavailable("the engine is loading")
        return self.engine.ready

    def more_eos(self, ready: Ready) -> tuple[int, ...]:
        """The ends of text that the tokenizer names and the engine has not read from the configurations."""
        known = {*ready.eos_token_ids}
        return tuple(i for i in self.tokenizer().eos_token_ids if i not in known and i < ready.vocab_size)

    def health(self) -> None:
        """Raise ApiError 503, with the reason, unless requests are answered now."""
        self.limits()
        self.tokenizer()

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not served here."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404, f"The model `{name[:200]}` does not exist; this server has `{self.names[0]}`.", param="model"
            )
        return name

    def admit(self) -> None:
        """Raise ApiError 429 when too many requests wait."""
        limit = self.config.limits.queued
        if limit and self.engine.open - self.limits().max_num_seqs >= limit:
            self.metrics.rejected.inc()
            raise ApiError(429, f"{limit} requests are waiting already; come again later", retry_after=1)

    async def encode(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an encoding method of the processor in the one thread for it. Raises ApiError for what it refuses."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.thread, lambda: function(*args, **kwargs))
        except DzError as e:
            raise from_dz(e) from e

    def check_tokens(self, tokens: list[int], vocab: int, param: str) -> None:
        """Raise ApiError 400 for an empty prompt and for ids that the model does not have."""
        if not tokens:
            raise bad(f"{param}: it has no tokens", param)
        if max(tokens) >= vocab:
            raise bad(f"{param}: the model has no token {max(tokens)}; ids end at {vocab - 1}", param)

    def check_length(self, texts: Iterable[str], param: str) -> None:
        """Raise ApiError 400 for text that no tokenizer could make fit: it is told from its characters, for tokenizing
        it would hold up everybody. Four times the length of tokens leaves room for what a tokenizer drops."""
        most = self.limits().max_model_len
        bound = max(SHORT_TEXT, 4 * most * self.tokenizer().longest_token)
        total = sum(map(len, texts))
        if total > bound:
            raise bad(f"{param}: {total:,} characters cannot fit into {most:,} tokens", param)

    def close(self) -> None:
        """Give back the thread."""
        self.thread.shutdown(wait=False, cancel_futures=True)
