"""OpenAI's API: the models, completions and chat completions. Everything else under `/v1` is unknown here.

A prompt that cannot be served is a plain answer with a 4xx status, also if a stream was asked for: the head of a
stream is sent once an engine has every prompt in its queue. Whatever happens, the answers are closed at the end, which
frees their blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.api.access import Tenant
from kvtier.api.engine_connection import Answers
from kvtier.api.engines import ServedModel
from kvtier.api.health import operation_routes
from kvtier.api.http_error import HttpError, http_error_of
from kvtier.api.json_body import JsonBody, read_body
from kvtier.api.openai.requests import Asked, read_chat, read_completion
from kvtier.api.openai.responses import (
    DONE,
    ChatShape,
    CompletionShape,
    Heading,
    ModelShape,
    Shape,
    Usage,
    error_body,
    error_event,
    model_list,
    one_model,
)
from kvtier.api.service import Service, new_id
from kvtier.api.streaming import ClientLeft, StreamedAnswer, while_connected
from kvtier.engine.process.messages import End, Piece
from kvtier.errors import EngineStopped, KvtierError

logger = logging.getLogger(__name__)

_FINGERPRINT_CHARACTERS = 12
_CLIENT_LEFT_STATUS = 499


def openai_app(service: Service) -> Starlette:
    """The app over `service`, whose engines somebody else starts and closes."""
    api = _OpenAi(service)
    app = Starlette(
        routes=[
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name:path}", api.show_model),
            Route("/v1/completions", api.complete, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            *operation_routes(service),
        ],
        exception_handlers={
            HttpError: _on_problem,
            KvtierError: _on_error,
            HTTPException: _on_http_error,
            ClientLeft: _on_client_left,
            ClientDisconnect: _on_client_left,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app


@dataclass(frozen=True, slots=True)
class _Kind:
    """What completions and chats differ in."""

    prefix: str
    read: Callable[[JsonBody, Mapping[str, object]], Asked]
    shape: Callable[[Heading, bool], Shape]


_CHAT = _Kind("chatcmpl", read_chat, ChatShape)
_COMPLETION = _Kind("cmpl", read_completion, CompletionShape)


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that was read. `name` is what it calls the model."""

    id: str
    tenant: Tenant
    name: str
    model: ServedModel
    asked: Asked
    kind: _Kind

    def shape(self) -> Shape:
        hello = self.model.hello
        fingerprint = None if hello is None else f"fp_{hello.namespace[:_FINGERPRINT_CHARACTERS]}"
        return self.kind.shape(Heading(self.id, self.name, fingerprint), self.asked.includes_usage)


class _OpenAi:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def list_models(self, request: Request) -> Response:
        self._service.tenant(request)
        models = [self._model_shape(model.name, model) for model in self._service.engines.models]
        return _json(model_list(models), _request_id(request))

    async def show_model(self, request: Request) -> Response:
        self._service.tenant(request)
        name = request.path_params["name"]
        model = self._service.engines.find(name)
        return _json(one_model(self._model_shape(name, model)), _request_id(request))

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, _CHAT)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, _COMPLETION)

    def _model_shape(self, name: str, model: ServedModel) -> ModelShape:
        hello = model.hello
        return ModelShape(name, int(self._service.started_at), None if hello is None else hello.max_model_len)

    async def _answer(self, request: Request, kind: _Kind) -> Response:
        request.state.id = new_id(kind.prefix)
        tenant = self._service.tenant(request)
        body = await read_body(request, self._service.config.max_body_bytes)
        name = body.needed_text("model")
        model = self._service.engines.find(name)
        asked = kind.read(body, model.options)
        job = _Job(request.state.id, tenant, name, model, asked, kind)
        if not asked.is_streamed:
            return _json(await while_connected(request, self._whole(job)), job.id)
        events = self._events(job)
        await while_connected(request, _begin(events))
        return StreamedAnswer(events, media_type="text/event-stream", headers={"x-request-id": job.id})

    async def _whole(self, job: _Job) -> bytes:
        with self._service.place():
            async with self._opened(job) as opened:
                usage = Usage()
                choices: list[list[Piece]] = [[] for _ in opened for _ in range(job.asked.params.n)]
                for number, answers in enumerate(opened):
                    usage.add_prompt(answers.prompt_tokens)
                    async for piece in answers:
                        choices[number * job.asked.params.n + piece.index].append(piece)
                        self._note_end(job, answers, piece, usage)
                return job.shape().whole(choices, usage)

    async def _events(self, job: _Job) -> AsyncGenerator[bytes, None]:
        """First nothing, when every prompt is in a queue, then the events of the stream."""
        with self._service.place():
            async with self._opened(job) as opened:
                shape, usage = job.shape(), Usage()
                yield b""
                try:
                    for answers in opened:
                        usage.add_prompt(answers.prompt_tokens)
                    async with contextlib.aclosing(_pieces(opened)) as pieces:
                        async for number, piece in pieces:
                            self._note_end(job, opened[number], piece, usage)
                            events = shape.chunk(number * job.asked.params.n + piece.index, piece)
                            if events:
                                yield events
                except KvtierError as error:
                    yield error_event(http_error_of(error))
                    return
                yield shape.usage_chunk(usage) + DONE if job.asked.includes_usage else DONE

    @contextlib.asynccontextmanager
    async def _opened(self, job: _Job) -> AsyncIterator[Sequence[Answers]]:
        """The answers to each prompt, all of which are in a queue. Afterwards they are closed."""
        asked = job.asked
        submitting = [
            asyncio.ensure_future(
                self._service.submit(
                    job.model,
                    prompt,
                    asked.params,
                    request_id=job.id if len(asked.prompts) == 1 else f"{job.id}-{number}",
                    tenant=job.tenant,
                    cache_salt=asked.cache_salt,
                )
            )
            for number, prompt in enumerate(asked.prompts)
        ]
        try:
            yield await asyncio.gather(*submitting)
        finally:
            for task in submitting:
                task.cancel()
            for outcome in await asyncio.gather(*submitting, return_exceptions=True):
                if isinstance(outcome, Answers):
                    outcome.close()

    def _note_end(self, job: _Job, answers: Answers, piece: Piece, usage: Usage) -> None:
        """Raises `EngineStopped` for an answer that ended and is not complete."""
        end = piece.end
        if end is not None:
            _check_complete(end)
            usage.add_answer(piece.index, answers.prompt_tokens, end)
            self._service.count(job.model, answers.prompt_tokens, end)


def _check_complete(end: End) -> None:
    if end.finish_reason not in ("stop", "length"):
        raise EngineStopped("the engine broke the answer off")


async def _begin(events: AsyncGenerator[bytes, None]) -> None:
    await anext(events)


async def _pieces(opened: Sequence[Answers]) -> AsyncGenerator[tuple[int, Piece], None]:
    """What comes for any of these, as it comes, with its number among them."""
    if len(opened) == 1:
        async for piece in opened[0]:
            yield 0, piece
        return
    came: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()

    async def pass_on(number: int, answers: Answers) -> None:
        try:
            async for piece in answers:
                came.put_nowait((number, piece))
        finally:
            came.put_nowait(None)

    passing = [asyncio.create_task(pass_on(number, answers)) for number, answers in enumerate(opened)]
    try:
        num_open = len(passing)
        while num_open:
            news = await came.get()
            if news is not None:
                yield news
                continue
            num_open -= 1
            for task in passing:
                if task.done():
                    task.result()  # raises what ended it
    finally:
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)


# --- answers that are not streamed ------------------------------------------------------------------------------------


def _request_id(request: Request) -> str:
    """The id of what is answered, which a request for no answers gets late."""
    found: str | None = getattr(request.state, "id", None)
    return new_id("req") if found is None else found


def _json(body: bytes, request_id: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, {"x-request-id": request_id, **(headers or {})}, "application/json")


async def _on_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HttpError)
    return _json(error_body(problem), _request_id(request), problem.status, problem.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvtierError)
    return await _on_problem(request, http_error_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentences = {
        404: (f"there is no {request.url.path} here", "unknown_url"),
        405: (f"{request.url.path} does not take {request.method}", "method_not_allowed"),
    }
    sentence, code = sentences.get(error.status_code, (error.detail, ""))
    return await _on_problem(request, HttpError(error.status_code, sentence, code, headers=dict(error.headers or {})))


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT_STATUS)  # nobody reads it; it is counted


async def _on_bug(request: Request, error: Exception) -> Response:
    """A mistake of ours. The HTTP server logs where it happened."""
    request_id = _request_id(request)
    logger.error("request %s failed: %r", request_id, error)
    sentence = f"the server failed; its log has more about {request_id}"
    return _json(error_body(HttpError(500, sentence, "internal_error")), request_id, 500)
