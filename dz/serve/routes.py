"""Every route of the server."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

import dz
from dz.serve import schemas
from dz.serve.chat import chat, options
from dz.serve.completions import completions
from dz.serve.errors import ApiError, bad
from dz.serve.jsonbody import dump
from dz.serve.messages import convert, texts_of
from dz.serve.metrics import CONTENT_TYPE
from dz.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from dz.serve.server import Server


def add(app: FastAPI, server: Server) -> None:
    """Add all routes to `app`."""
    _generation(app, server)
    _models(app, server)
    _tokens(app, server)
    _operations(app, server)


def _json(value: Any) -> Response:
    return Response(dump(value), media_type="application/json")


def _generation(app: FastAPI, server: Server) -> None:
    @app.post(
        "/v1/chat/completions", responses=schemas.ok(schemas.ChatCompletion, events=True), response_class=Response
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await chat(server, request, body)

    @app.post("/v1/completions", responses=schemas.ok(schemas.Completion, events=True), response_class=Response)
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        return await completions(server, request, body)


def _models(app: FastAPI, server: Server) -> None:
    def card(name: str) -> dict[str, Any]:
        ready = server.engine.ready
        return {
            "id": name,
            "object": "model",
            "created": server.created,
            "owned_by": "dz",
            "root": server.config.source.name,
            "parent": None,
            "max_model_len": ready.max_model_len if ready else None,
        }

    shown = server.config.names or (server.config.source.name,)

    @app.get("/v1/models", responses=schemas.ok(schemas.ModelList), response_class=Response)
    async def models() -> Response:
        return _json({"object": "list", "data": [card(n) for n in shown]})

    @app.get("/v1/models/{name:path}", responses=schemas.ok(schemas.ModelCard), response_class=Response)
    async def model(name: str) -> Response:
        given = name if name in server.names else f"/{name}"  # a path loses its first slash in a URL
        if given not in server.names:
            server.check_model(name)
        return _json(card(given))


def _tokens(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize", responses=schemas.ok(schemas.Tokens), response_class=Response)
    async def tokenize(body: TokenizeRequest) -> Response:
        server.check_model(body.model)
        processor = server.tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise bad("prompt: give either prompt or messages", "prompt")
        if body.messages is not None:
            messages = await asyncio.to_thread(convert, body.messages, server.config.limits.images)
            server.check_length(texts_of(messages), "messages")
            tokens = (await server.encode(processor.prepare_chat, messages, options(body, processor))).tokens
        else:
            text = body.prompt or ""
            server.check_length([text], "prompt")
            tokens = await server.encode(processor.encode, text, add_special_tokens=body.add_special_tokens)
        texts = await asyncio.to_thread(list, map(processor.token_text, tokens)) if body.return_token_strs else None
        length = server.limits().max_model_len
        return _json({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": texts})

    @app.post("/detokenize", responses=schemas.ok(schemas.Text), response_class=Response)
    async def detokenize(body: DetokenizeRequest) -> Response:
        server.check_model(body.model)
        processor = server.tokenizer()
        if body.tokens:
            server.check_tokens(body.tokens, server.limits().vocab_size, "tokens")
        return _json({"prompt": await asyncio.to_thread(processor.decode, body.tokens)})

    @app.get("/tokenizer_info", responses={200: {"description": "Facts about the tokenizer."}}, response_class=Response)
    async def tokenizer_info() -> Response:
        return _json(server.tokenizer().info())


def _operations(app: FastAPI, server: Server) -> None:
    def described(text: str) -> dict[int | str, dict[str, Any]]:
        return {200: {"description": text}}

    empty = described("Requests are answered.")

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=empty, response_class=Response)
    async def health() -> Response:
        server.health()
        return Response()

    @app.head("/ping", include_in_schema=False)
    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", responses=empty, response_class=Response)
    async def ping() -> Response:
        server.health()
        return Response()

    @app.get("/version", responses=described("The version of dz."), response_class=Response)
    async def version() -> Response:
        return _json({"version": dz.__version__})

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", responses=described("Prometheus text."), response_class=Response)
    async def metrics() -> Response:
        return Response(server.metrics.text(), headers={"content-type": CONTENT_TYPE})

    @app.get("/load", responses=described("Open sequences."), response_class=Response)
    async def load() -> Response:
        if server.engine.state == "stopped":
            raise ApiError(503, server.engine.reason)
        return _json({"server_load": server.engine.open})
