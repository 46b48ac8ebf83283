"""Ollama's API over the engines: its paths, its answers and its errors.

Models cannot be pulled, made or removed here: a deployment serves those of its file, from its start to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvtier import __version__
from kvtier.api.engines import Engines
from kvtier.api.health import operation_routes
from kvtier.api.http_error import HttpError, http_error_of
from kvtier.api.json_body import JsonBody, read_body
from kvtier.api.ollama.models import description, running, tags
from kvtier.api.ollama.requests import Ask, LoadModel, find_model, hello_of, read_chat, read_generate
from kvtier.api.ollama.responses import Answering, loaded
from kvtier.api.service import Service, new_id
from kvtier.api.streaming import ClientLeft, StreamedAnswer, while_connected
from kvtier.errors import KvtierError

logger = logging.getLogger(__name__)

_NO_EMBEDDINGS = "embeddings are not computed here"
_FIXED_MODELS = "the models here are those of the deployment's file: they cannot be pulled, pushed, made or removed"
_NOT_SERVED = (
    ("/api/pull", ["POST"], _FIXED_MODELS),
    ("/api/push", ["POST"], _FIXED_MODELS),
    ("/api/create", ["POST"], _FIXED_MODELS),
    ("/api/copy", ["POST"], _FIXED_MODELS),
    ("/api/delete", ["DELETE"], _FIXED_MODELS),
    ("/api/blobs/{digest}", ["HEAD", "POST"], _FIXED_MODELS),
    ("/api/embed", ["POST"], _NO_EMBEDDINGS),
    ("/api/embeddings", ["POST"], _NO_EMBEDDINGS),
)
_CLIENT_LEFT_STATUS = 499


def ollama_app(service: Service) -> Starlette:
    """Ollama's API. Its errors are ``{"error": sentence}``, with the status that says whose fault it is."""

    async def root(request: Request) -> Response:
        """What Ollama's own clients look for before anything else; it needs no key."""
        return PlainTextResponse("Ollama is running")

    async def generate(request: Request) -> Response:
        return await _answer(service, request, read_generate)

    async def chat(request: Request) -> Response:
        return await _answer(service, request, read_chat)

    async def list_models(request: Request) -> Response:
        service.tenant(request)
        return _json(request, tags(service))

    async def list_running(request: Request) -> Response:
        service.tenant(request)
        return _json(request, running(service))

    async def show(request: Request) -> Response:
        service.tenant(request)
        body = await read_body(request, service.config.max_body_bytes)
        old_name = body.text("name")  # as older clients say it
        model = find_model(service.engines, body.text("model") or old_name or body.needed_text("model"))
        body.flag("verbose")
        body.refuse_rest()
        return _json(request, description(model, hello_of(model)))

    async def version(request: Request) -> Response:
        service.tenant(request)
        return _json(request, {"version": __version__})

    def not_served(sentence: str) -> Callable[[Request], Awaitable[Response]]:
        async def refuse(request: Request) -> Response:
            service.tenant(request)
            raise HttpError(501, sentence, "unsupported")

        return refuse

    routes = [
        Route("/", root),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/tags", list_models),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/ps", list_running),
        Route("/api/version", version),
        *(Route(path, not_served(sentence), methods=methods) for path, methods, sentence in _NOT_SERVED),
        *operation_routes(service),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HttpError: _on_problem,
            KvtierError: _on_error,
            HTTPException: _on_http_error,
            ClientLeft: _on_leaving,
            ClientDisconnect: _on_leaving,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app


async def _answer(service: Service, request: Request, read: Callable[[JsonBody, Engines], Ask | LoadModel]) -> Response:
    request_id = request.state.id = new_id("ollama")
    tenant = service.tenant(request)
    asked = read(await read_body(request, service.config.max_body_bytes), service.engines)
    if isinstance(asked, LoadModel):
        return _json(request, loaded(asked))
    answering = Answering(service, asked, tenant, request_id)
    if not asked.is_streamed:
        return _json(request, await while_connected(request, answering.whole()))
    lines = answering.lines()
    try:
        await while_connected(request, anext(lines))
    except BaseException:  # also when this task is cancelled just as the engine takes the prompt
        await lines.aclose()
        raise
    return StreamedAnswer(lines, media_type="application/x-ndjson", headers={"x-request-id": request_id})


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return _json(request, {"error": error.sentence}, error.status, error.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvtierError)
    return await _on_problem(request, http_error_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentences = {
        404: f"there is no {request.url.path} here",
        405: f"{request.url.path} does not take {request.method}",
    }
    sentence = sentences.get(error.status_code, error.detail)
    return _json(request, {"error": sentence}, error.status_code, error.headers)


async def _on_leaving(request: Request, error: Exception) -> Response:
    """Nobody reads it; it is counted."""
    return Response(status_code=_CLIENT_LEFT_STATUS)


async def _on_bug(request: Request, error: Exception) -> Response:
    """A mistake of ours. The HTTP server logs where it happened."""
    logger.error("request %s failed: %r", getattr(request.state, "id", request.url.path), error)
    return _json(request, {"error": "internal error: the server's log says more"}, 500)


def _json(
    request: Request,
    document: Mapping[str, object] | bytes,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """With the id of the request, where it has one: `kvtier explain` knows it by that."""
    body = document if isinstance(document, bytes) else msgspec.json.encode(document)
    request_id = getattr(request.state, "id", None)
    ids = {} if request_id is None else {"x-request-id": request_id}
    return Response(body, status, {**ids, **(headers or {})}, media_type="application/json")
