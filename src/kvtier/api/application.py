"""What all APIs share: request ids, errors, JSON, and the way from a body to a response."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtier.api.access import ApiTenant
from kvtier.api.body_messages import BodyAsks, BodyLoads, BodyPasses, BodyRefused, ReadBody
from kvtier.api.engines import ModelCatalog
from kvtier.api.generation import AnswerEncoder, Generation, GenerationRequest
from kvtier.api.health import operation_routes
from kvtier.api.http_error import HttpError, WrongKey, http_error_of
from kvtier.api.json_body import JsonBody, decode_body
from kvtier.api.limits import INLINE_BODY_BYTES
from kvtier.api.passing import PassedBody, salt_maker
from kvtier.api.prompt_length import check_length
from kvtier.api.service import Service, new_id
from kvtier.api.streaming import ClientLeft, StreamedAnswer, while_connected
from kvtier.api.vllm.bodies import ReadForVllm
from kvtier.api.web_guard import WebGuard, WebRules
from kvtier.engine.process.messages import EncodedPrompt
from kvtier.errors import KvtierError
from kvtier.sizes import format_size

_Asked = TypeVar("_Asked")

logger = logging.getLogger(__name__)

_CLIENT_LEFT_STATUS = 499


class Application(ABC):
    """One API over `service`, whose owner starts and closes the engines. Subclasses define paths and error bodies.

    A prompt that cannot be served gets a plain response with a 4xx status, even if a stream was requested: the head of
    a stream is sent only once all prompts are in an engine's queue.
    """

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    def routes(self) -> list[Route]: ...

    @abstractmethod
    def error_body(self, error: HttpError) -> bytes: ...

    def error_body_for(self, request: Request, error: HttpError) -> bytes:
        """Overridden by applications with paths whose errors have another form."""
        return self.error_body(error)

    def error_headers(self, request: Request) -> Mapping[str, str]:
        """Additional headers of such errors."""
        return {}

    @abstractmethod
    def bug_sentence(self, request_id: str) -> str:
        """The sentence for clients about an internal error."""

    def starlette(self) -> Starlette:
        app = Starlette(
            routes=[*self.routes(), *operation_routes(self.service)],
            exception_handlers={
                HttpError: self._on_http_error,
                KvtierError: self._on_kvtier_error,
                HTTPException: self._on_starlette_error,
                ClientLeft: self._on_client_left,
                ClientDisconnect: self._on_client_left,
                Exception: self._on_bug,
            },
        )
        app.router.redirect_slashes = False
        return app

    def guarded(self, app: ASGIApp, rules: WebRules) -> ASGIApp:
        """Wrap this API's `app`, so that only requests that `rules` allow pass."""
        return WebGuard(app, rules, self.refuse)

    async def refuse(self, error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with an error, outside of the API's own routes."""
        response = await self._on_http_error(Request(scope), error)
        await response(scope, receive, send)

    def request_id(self, request: Request) -> str:
        """The id of a request for answers, for `kvtier explain`. Other requests have none unless their API sets one."""
        found: str = getattr(request.state, "id", "")
        return found

    def json(
        self, request: Request, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> Response:
        request_id = self.request_id(request)
        ids = {"x-request-id": request_id} if request_id else {}
        return Response(body, status, {**ids, **(headers or {})}, "application/json")

    def open(self, request: Request, id_prefix: str) -> ApiTenant:
        """Give a request for answers its id; returns its tenant. Raises `HttpError`."""
        request.state.id = new_id(id_prefix)
        return self.service.tenant(request)

    async def read(
        self,
        request: Request,
        tenant: ApiTenant,
        kind: str,
        read: Callable[[JsonBody, ModelCatalog], _Asked],
        read_for_vllm: ReadForVllm,
    ) -> _Asked | BodyAsks | BodyLoads | PassedBody:
        """Read the body with `read`, or, if it is large, in another process, which finds the reader by `kind`.

        If vLLM runs any model, `read_for_vllm` is tried first; it returns None for bodies for other models.
        """
        service = self.service
        pieces = await service.open_bodies.receive(request)
        num_bytes = sum(map(len, pieces))
        has_keys = bool(service.config.keys)
        if num_bytes <= INLINE_BODY_BYTES:
            body = b"".join(pieces)
            if service.vllm.models:
                passes = read_for_vllm(body, service.snapshot(), salt_maker(tenant, has_keys=has_keys))
                if passes is not None:
                    return PassedBody(passes, [body]) if isinstance(passes, BodyPasses) else passes
            return read(decode_body(body), service.engines)
        question = ReadBody(kind, num_bytes, service.snapshot(), tenant.salt, has_keys)
        reply = await while_connected(request, service.large_bodies.read(question, pieces))
        if isinstance(reply, BodyRefused):
            raise HttpError(reply.status, reply.sentence, reply.code, reply.parameter, reply.headers)
        return PassedBody(reply, pieces) if isinstance(reply, BodyPasses) else reply

    async def read_small(self, request: Request) -> JsonBody:
        """Read a short body, such as one with a name. Raises `HttpError` for a large one."""
        body = b"".join(await self.service.open_bodies.receive(request))
        if len(body) > INLINE_BODY_BYTES:
            raise HttpError(413, f"the body is larger than {format_size(INLINE_BODY_BYTES)}", "body_too_large")
        return decode_body(body)

    def decoded_request(self, found: BodyAsks) -> GenerationRequest:
        """The request of a body that another process has read."""
        pairs = zip(found.prompts, found.beginnings, strict=True)
        return GenerationRequest(
            found.name,
            self.service.engines.find(found.model),
            [EncodedPrompt(prompt, beginning) for prompt, beginning in pairs],
            found.params,
            found.is_streamed,
            found.includes_usage,
            found.cache_salt,
            found.form,
            found.record,
            found.prompt_form,
            found.session,
            found.explains,
            found.prefix,
            found.retention,
            found.grammar_field,
        )

    async def with_prefix(self, asked: GenerationRequest, tenant: ApiTenant) -> GenerationRequest:
        """Put the text of the named prefix before the conversation. Raises `HttpError` if they do not fit."""
        if not asked.prefix:
            return asked
        [prompt] = asked.prompts
        whole = await self.service.prefixes.before(asked.prefix, asked.model.name, prompt, tenant)
        check_length(whole, asked.model.hello)
        return dataclasses.replace(asked, prompts=[whole])

    async def answer(
        self, request: Request, tenant: ApiTenant, asked: GenerationRequest, encoder: AnswerEncoder
    ) -> Response:
        request_id = request.state.id
        asked = await self.with_prefix(asked, tenant)
        generation = Generation(self.service, asked, tenant, request_id, encoder)
        if not asked.is_streamed:
            return self.json(request, await while_connected(request, generation.whole()))
        chunks = generation.chunks()
        try:
            await while_connected(request, anext(chunks))
        except BaseException:  # also if this task is cancelled just as the engine takes the prompt
            await chunks.aclose()
            raise
        return StreamedAnswer(chunks, media_type=encoder.media_type, headers={"x-request-id": request_id})

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        if isinstance(error, WrongKey):
            error = await self.service.slow_down(request, error)
        body = self.error_body_for(request, error)
        return self.json(request, body, error.status, {**error.headers, **self.error_headers(request)})

    async def _on_kvtier_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, KvtierError)
        return await self._on_http_error(request, http_error_of(error))

    async def _on_starlette_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentences = {
            404: (f"the path {request.url.path} does not exist", "unknown_url"),
            405: (f"{request.url.path} does not support {request.method}", "method_not_allowed"),
        }
        sentence, code = sentences.get(error.status_code, (error.detail, ""))
        http_error = HttpError(error.status_code, sentence, code, headers=dict(error.headers or {}))
        return await self._on_http_error(request, http_error)

    async def _on_client_left(self, request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_LEFT_STATUS)  # the client is gone, but the status is counted

    async def _on_bug(self, request: Request, error: Exception) -> Response:
        """An internal error. The HTTP server logs its traceback."""
        request_id = request.state.id = self.request_id(request)
        key = getattr(request.state, "key", "")
        logger.error("request %s%s failed: %r", request_id or request.url.path, f" of {key}" if key else "", error)
        return await self._on_http_error(request, HttpError(500, self.bug_sentence(request_id), "internal_error"))
