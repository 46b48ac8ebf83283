"""Passes requests on to engines of vLLM, and their answers back, unchanged.

However a request ends, its connection to the engine is closed, which stops the engine's work on it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvtier.api.access import ApiTenant, salt_of
from kvtier.api.body_messages import OPENAI_RESPONSE, BodyPasses
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import shown
from kvtier.api.service import Service
from kvtier.api.streaming import ABORT, StreamedAnswer, while_connected
from kvtier.api.vllm.exchange import Headers
from kvtier.api.vllm.model import UpstreamAnswer, UpstreamRequest, VllmModel
from kvtier.api.vllm.response_places import ResponseIdReader, ResponsePlace
from kvtier.errors import EngineAway

_BETWEEN_TWO = frozenset(
    (
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length"),
        *(b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    )
)
"""Headers about a connection rather than a message, which are not forwarded."""

_OF_CLIENT = frozenset(
    (b"host", b"authorization", b"x-api-key", b"cookie", b"origin", b"expect", b"accept-encoding", b"x-request-id")
)
"""Headers of a request that are for this server only."""

_OF_ENGINE = frozenset((b"server", b"date", b"x-request-id", b"set-cookie"))
_CROSS_ORIGIN = b"access-control-"
_OK = 200
_END_OF_EVENT = b"\n\n"
_PATH_CHARACTERS = "/:@!$&'()*+,;=~"


@dataclass(frozen=True, slots=True)
class PassedBody:
    """A body for vLLM: what was read from it, and its original bytes. With an `engine`, only that one can answer."""

    passes: BodyPasses
    pieces: Sequence[bytes]
    method: str = "POST"
    engine: str = ""

    @property
    def sent(self) -> Sequence[bytes]:
        return self.pieces if self.passes.body is None else [self.passes.body]


def salt_maker(tenant: ApiTenant, *, has_keys: bool) -> _SaltMaker | None:
    """A function that adds the tenant's salt to a body's own, to keep tenants' blocks apart; None without keys."""
    return _SaltMaker(tenant) if has_keys else None


@dataclass(frozen=True, slots=True)
class _SaltMaker:
    tenant: ApiTenant

    def __call__(self, cache_salt: str) -> str:
        return salt_of(self.tenant, cache_salt)


@contextlib.asynccontextmanager
async def upstream_answer(
    service: Service, tenant: ApiTenant, passed: PassedBody, request_id: str, headers: Headers, query: str = ""
) -> AsyncIterator[UpstreamAnswer]:
    """A scope with an engine's answer, once its first bytes have arrived; closes it at its end.

    Raises `HttpError` if the server is full, or the request refers to a response that is gone, and as
    `VllmModel.answer`.
    """
    passes = passed.passes
    model = service.vllm.get(passes.model)
    if model is None:
        raise HttpError(404, f"the model {passes.name!r} is not served here", "model_not_found", "model")
    own_id = request_id.rpartition("-")[2]  # without our prefix: vLLM adds its own
    request = UpstreamRequest(
        target=quote(passes.path, safe=_PATH_CHARACTERS) + (f"?{query}" if query else ""),
        headers=[*headers, (b"x-request-id", own_id.encode())],
        body=passed.sent,
        keys=passes.keys,
        method=passed.method,
        prompt_id=own_id,
    )
    engine = passed.engine or _engine_of_previous(service, tenant, model, passes)
    with service.place(tenant, passes.num_answers, sum(map(len, passed.sent))):
        started_at = time.monotonic()
        answer = await (model.answer_of(engine, request) if engine else model.answer(request))
        if answer is None:
            sentence = "the response is gone: the engine that had it has stopped"
            raise HttpError(404, sentence, "response_not_found", "response_id")
        try:
            ttft_s = time.monotonic() - started_at if passes.is_streamed else None
            if ttft_s is not None:
                service.metrics.ttft_seconds.labels(model=model.name).observe(ttft_s)
            service.log_passed(model.name, tenant, request_id, ttft_s)
            yield answer
        finally:
            answer.close()


def _engine_of_previous(service: Service, tenant: ApiTenant, model: VllmModel, passes: BodyPasses) -> str:
    """The engine that has the response to be continued; empty if any engine will do.

    Raises `HttpError` if it is unknown. Without keys a model's only engine is asked all the same: it may have been kept
    there since before this server started.
    """
    if not passes.previous:
        return ""
    place = service.placed_responses.find(tenant.name, passes.previous)
    if place is not None and place.model == model.name:
        return place.engine
    if len(model.engines) == 1 and not service.config.keys:
        return model.engines[0].name
    raise unknown_response(passes.previous, "previous_response_id")


def unknown_response(response_id: str, parameter: str = "response_id") -> HttpError:
    sentence = f"the response {shown(response_id)} is unknown or no longer kept"
    return HttpError(404, sentence, "response_not_found", parameter)


class Passing:
    """One request that is passed on unchanged."""

    def __init__(self, service: Service, request: Request, tenant: ApiTenant, passed: PassedBody) -> None:
        self._service = service
        self._request = request
        self._tenant = tenant
        self._passed = passed
        self._answer: UpstreamAnswer | None = None

    async def response(self) -> Response:
        """Raises `HttpError` or `KvtierError` for a failure before the first byte of the answer."""
        chunks = self._chunks()
        try:
            await while_connected(self._request, anext(chunks))
            answer = self._answer
            assert answer is not None
            headers = self._response_headers(answer)
            if answer.is_whole:
                await chunks.aclose()
                response = Response(answer.first, answer.status)
                response.raw_headers = [*headers, (b"content-length", str(len(answer.first)).encode())]
                return response
        except BaseException:
            await chunks.aclose()
            raise
        streamed = StreamedAnswer(chunks, media_type="")
        streamed.status_code = answer.status
        streamed.raw_headers = headers
        return streamed

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """First an empty chunk, once the beginning of the answer has arrived, then its bytes."""
        request_id: str = self._request.state.id
        headers = request_headers(self._request)
        query = self._request.scope.get("query_string", b"").decode("latin-1")
        async with upstream_answer(self._service, self._tenant, self._passed, request_id, headers, query) as answer:
            self._answer = answer
            note = self._response_noter(answer, request_id)
            note(answer.first)
            yield b""
            end = answer.first[-len(_END_OF_EVENT) :]
            if answer.first:
                yield answer.first
            try:
                while piece := await answer.read():
                    note(piece)
                    end = (end + piece)[-len(_END_OF_EVENT) :]
                    yield piece
            except EngineAway as error:
                if answer.is_event_stream:
                    yield (b"" if end == _END_OF_EVENT else _END_OF_EVENT) + _error_event(
                        self._passed.passes.path, error, self._request.state.id
                    )
                elif ABORT in self._request.scope:
                    self._request.scope[ABORT]()  # cut the connection, so that the client notices the missing end

    def _response_noter(self, answer: UpstreamAnswer, request_id: str) -> Callable[[bytes], None]:
        """Notes which engine has the response that begins with these bytes, if this answer is one."""
        passes, service = self._passed.passes, self._service
        model = service.vllm.get(passes.model)
        if passes.path != OPENAI_RESPONSE or answer.status != _OK or model is None:
            return lambda piece: None
        reader = ResponseIdReader(is_event_stream=answer.is_event_stream)

        def note(piece: bytes) -> None:
            response_id = reader.feed(piece)
            if response_id is not None:
                place = ResponsePlace(model.name, answer.engine.name)
                service.placed_responses.note(self._tenant.name, response_id, place)
                model.note_response(answer.engine.name, request_id.rpartition("-")[2], response_id)

        return note

    def _response_headers(self, answer: UpstreamAnswer) -> list[tuple[bytes, bytes]]:
        own = [(b"x-request-id", self._request.state.id.encode())]
        if answer.is_event_stream:
            own += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        names = {name for name, _ in own}
        return own + [
            (name, value)
            for name, value in _without_connection(answer.headers)
            if name not in names and name not in _OF_ENGINE and not name.startswith(_CROSS_ORIGIN)
        ]


def request_headers(request: Request) -> Headers:
    """The client's headers that are forwarded to an engine."""
    given = [(name.lower(), value) for name, value in request.scope["headers"]]
    return [(name, value) for name, value in _without_connection(given) if name not in _OF_CLIENT]


def _without_connection(headers: Headers) -> Headers:
    named = {
        one.strip().lower()
        for name, value in headers
        if name == b"connection"
        for one in value.split(b",")
        if one.strip()
    }
    return [(name, value) for name, value in headers if name not in _BETWEEN_TWO and name not in named]


def _error_event(path: str, error: Exception, request_id: str) -> bytes:
    """The end of a stream that failed, in the error form of this path."""
    sentence = str(error)
    if path == OPENAI_RESPONSE or path.startswith(f"{OPENAI_RESPONSE}/"):
        document: dict[str, object] = {"type": "error", "code": "server_error", "message": sentence, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(document) + _END_OF_EVENT
    if path == "/v1/messages":
        fields = {"type": "api_error", "message": sentence}
        document = {"type": "error", "error": fields, "request_id": request_id}
        return b"event: error\ndata: " + msgspec.json.encode(document) + _END_OF_EVENT
    document = {"message": sentence, "type": "server_error", "param": None, "code": "unavailable"}
    return b"data: " + msgspec.json.encode({"error": document}) + _END_OF_EVENT
