"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dz.serve import fields, sampling
from dz.serve.completions import respond
from dz.serve.errors import bad
from dz.serve.job import Plan, Prompt
from dz.serve.logprobs import Shown
from dz.serve.messages import convert, texts_of
from dz.serve.protocol import ChatRequest
from dz.serve.server import Server
from dz.serve.shapes import ChatShape, Wanted
from dz.upstream.media import pack
from dz.upstream.processing import ChatOptions, Prepared, Processor


async def chat(server: Server, request: Request, body: ChatRequest) -> Response:
    """Answer a chat. Raises ApiError."""
    model = server.check_model(body.model)
    fields.check(body)
    ready, processor = server.limits(), server.tokenizer()
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs: it needs logprobs to be true", "top_logprobs")
    server.admit()
    messages = await asyncio.to_thread(convert, body.messages, server.config.limits.images)
    server.check_length(texts_of(messages), "messages")
    prepared = await server.encode(processor.prepare_chat, messages, options(body, processor))
    server.check_tokens(prepared.tokens, ready.vocab_size, "messages")
    prompt = await _prompt(prepared)
    asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, name = body.max_tokens, "max_tokens"
    if asked == 0:
        raise bad(f"{name}: it must be at least 1", name)
    tokens = sampling.max_tokens(
        asked,
        len(prompt.tokens),
        ready.max_model_len,
        given=server.defaults,
        otherwise=None,
        fields=(name, "messages"),
    )
    chosen = sampling.sampling(
        body,
        server.defaults,
        tokens=tokens,
        vocab=ready.vocab_size,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        eos=server.more_eos(ready),
    )
    plan = Plan(
        prompts=[prompt],
        sampling=[chosen],
        n=body.choices,
        stops=body.stop,
        stop_token_ids=body.stop_token_ids or (),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
    )
    wanted = Wanted(
        id=f"chatcmpl-{request.state.request_id}",
        model=model,
        shown=Shown(processor, bool(body.return_tokens_as_token_ids)),
        logprobs=bool(body.logprobs),
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
        usage=bool(body.stream_options and body.stream_options.include_usage),
        usage_always=bool(body.stream_options and body.stream_options.continuous_usage_stats),
    )
    return await respond(server, request, plan, ChatShape(wanted), wanted, stream=body.streams)


def options(body: Any, processor: Processor) -> ChatOptions:
    """What a body says about the template. Raises ApiError 400 for what the template would ignore."""
    variables = dict(body.chat_template_kwargs or {})
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        if not re.search(r"\breasoning_effort\b", processor.chat.template):
            raise bad("reasoning_effort: the model's chat template has no such setting", "reasoning_effort")
        variables.setdefault("reasoning_effort", effort)
    if body.add_generation_prompt and body.continue_final_message:
        raise bad("continue_final_message: it needs add_generation_prompt to be false", "continue_final_message")
    return ChatOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=variables,
        documents=getattr(body, "documents", None),
    )


async def _prompt(prepared: Prepared) -> Prompt:
    media = await asyncio.to_thread(pack, prepared.media) if prepared.media else {}
    return Prompt(prepared.tokens, "", media)
