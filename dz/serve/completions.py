"""POST /v1/completions, and the way from a plan to a response that chat shares."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from dz.core.messages import Ready, Sampling
from dz.serve import fields, sampling
from dz.serve.answer import answer, log_end
from dz.serve.errors import bad
from dz.serve.job import Job, Plan, Prompt
from dz.serve.logprobs import Shown
from dz.serve.protocol import MAX_PROMPTS, CompletionRequest
from dz.serve.server import Server
from dz.serve.shapes import CompletionShape, Shape, Wanted

DEFAULT_TOKENS = 16  # OpenAI's default for completions


async def completions(server: Server, request: Request, body: CompletionRequest) -> Response:
    """Continue prompts. Raises ApiError."""
    model = server.check_model(body.model)
    fields.check(body)
    ready, processor = server.limits(), server.tokenizer()
    if len(body.prompt) * body.choices > MAX_PROMPTS:
        raise bad(f"n: {len(body.prompt)} prompts times {body.choices}; at most {MAX_PROMPTS} answers are given", "n")
    if body.max_tokens == 0 and not body.echo:
        raise bad("max_tokens: 0 is only for echo", "max_tokens")
    if body.echo and body.streams and body.logprobs is not None:
        raise bad("echo: with logprobs it is not available in streams", "echo")
    server.admit()
    prompts = [await _prompt(server, p, body, ready) for p in body.prompt]
    plan = Plan(
        prompts=prompts,
        sampling=[_sampling(server, body, p, ready) for p in prompts],
        n=body.choices,
        stops=body.stop,
        stop_token_ids=body.stop_token_ids or (),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
    )
    wanted = Wanted(
        id=f"cmpl-{request.state.request_id}",
        model=model,
        shown=Shown(processor, bool(body.return_tokens_as_token_ids)),
        logprobs=body.logprobs is not None,
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
        usage=bool(body.stream_options and body.stream_options.include_usage),
        usage_always=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        echo=bool(body.echo),
        drop_output=body.max_tokens == 0,
    )
    return await respond(server, request, plan, CompletionShape(wanted), wanted, stream=body.streams)


async def respond(
    server: Server, request: Request, plan: Plan, shape: Shape, wanted: Wanted, *, stream: bool
) -> Response:
    """Run a plan and answer."""
    server.admit()  # again: others may have come while the prompt was encoded; from here to the engine nothing waits
    job = Job(server.engine, server.tokenizer(), server.metrics, plan, wanted.id)
    server.jobs.add(job)

    def over() -> None:
        server.jobs.discard(job)
        if server.config.log_requests:
            log_end(job, request.url.path)

    return await answer(request, job, shape, wanted, stream=stream, over=over)


async def _prompt(server: Server, given: str | list[int], body: CompletionRequest, ready: Ready) -> Prompt:
    processor = server.tokenizer()
    if isinstance(given, str):
        server.check_length([given], "prompt")
        tokens = await server.encode(processor.encode, given, add_special_tokens=body.add_special_tokens)
        text = given
    else:
        tokens = given
        text = processor.decode(given, skip_special_tokens=False) if body.echo and max(given) < ready.vocab_size else ""
    server.check_tokens(tokens, ready.vocab_size, "prompt")
    return Prompt(tokens, text)


def _sampling(server: Server, body: CompletionRequest, prompt: Prompt, ready: Ready) -> Sampling:
    asked = 1 if body.max_tokens == 0 else body.max_tokens
    tokens = sampling.max_tokens(
        asked, len(prompt.tokens), ready.max_model_len, given=server.defaults, otherwise=DEFAULT_TOKENS
    )
    echoed = body.logprobs if body.echo and body.logprobs is not None else None
    return sampling.sampling(
        body,
        server.defaults,
        tokens=tokens,
        vocab=ready.vocab_size,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs if echoed is None else max(echoed, body.prompt_logprobs or 0),
        eos=server.more_eos(ready),
    )
