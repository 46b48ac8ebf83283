"""The paths of Anthropic's API, for models of kvtier's own engine; bodies for vLLM are passed on unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.api.access import ApiTenant
from kvtier.api.anthropic.encoder import MessageEncoder, count_body, error_body
from kvtier.api.anthropic.requests import decode_record, read_count, read_message
from kvtier.api.application import Application
from kvtier.api.body_messages import ANTHROPIC_COUNT, ANTHROPIC_MESSAGE, BodyAsks
from kvtier.api.engines import ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.passing import PassedBody, Passing
from kvtier.api.prompt_length import prompt_bytes
from kvtier.api.service import new_id
from kvtier.api.streaming import while_connected
from kvtier.api.vllm.bodies import ReadForVllm

_Read = Callable[[JsonBody, ModelCatalog], GenerationRequest]

PATHS = (ANTHROPIC_MESSAGE, ANTHROPIC_COUNT)


def has_message_errors(path: str) -> bool:
    """Whether errors of this path have Anthropic's form: also of paths below it that are not served, as for batches."""
    return path == ANTHROPIC_MESSAGE or path.startswith(f"{ANTHROPIC_MESSAGE}/")


class MessagePaths:
    """Routes of the OpenAI application. The reader for a path in `readers_for_vllm` sees each body first."""

    def __init__(self, application: Application, readers_for_vllm: Mapping[str, ReadForVllm]) -> None:
        self._application = application
        self._service = application.service
        self._readers_for_vllm = readers_for_vllm

    def routes(self) -> list[Route]:
        return [
            Route(ANTHROPIC_MESSAGE, self._create, methods=["POST"]),
            Route(ANTHROPIC_COUNT, self._count, methods=["POST"]),
        ]

    def error_body(self, request: Request, error: HttpError) -> bytes:
        return error_body(error, self._application.request_id(request))

    async def _create(self, request: Request) -> Response:
        tenant = self._application.open(request, "req")
        asked = await self._read(request, tenant, ANTHROPIC_MESSAGE, read_message)
        if isinstance(asked, PassedBody):
            return await Passing(self._service, request, tenant, asked).response()
        request.state.id = message_id = new_id("msg").replace("-", "_")
        encoder = MessageEncoder(asked, message_id, decode_record(asked.record))
        response = await self._application.answer(request, tenant, asked, encoder)
        response.headers["request-id"] = message_id
        return response

    async def _count(self, request: Request) -> Response:
        tenant = self._application.open(request, "req")
        asked = await self._read(request, tenant, ANTHROPIC_COUNT, read_count)
        if isinstance(asked, PassedBody):
            return await Passing(self._service, request, tenant, asked).response()
        [prompt] = (await self._application.with_prefix(asked, tenant)).prompts
        engines = self._service.engines
        with self._service.place(tenant, 1, prompt_bytes(prompt)):
            tokens = await while_connected(request, engines.tokenize(engines.find(asked.model.name), prompt))
        return self._application.json(request, count_body(len(tokens)), headers={"request-id": request.state.id})

    async def _read(
        self, request: Request, tenant: ApiTenant, path: str, read: _Read
    ) -> GenerationRequest | PassedBody:
        application = self._application
        found = await application.read(request, tenant, path, read, self._readers_for_vllm[path])
        if isinstance(found, PassedBody):
            return found
        asked = application.decoded_request(found) if isinstance(found, BodyAsks) else found
        assert isinstance(asked, GenerationRequest), "only Ollama's bodies can ask for a load alone"
        return asked
