"""The paths of the Responses API, for models of kvtier's own engine; what is for vLLM is passed on unchanged.

Requests about a stored response go to the engine of vLLM that has it, or to kvtier's own store.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.api.access import ApiTenant
from kvtier.api.application import Application
from kvtier.api.body_messages import OPENAI_RESPONSE, BodyAsks, BodyPasses
from kvtier.api.chat.answer_blocks import AnswerBlock
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import shown
from kvtier.api.limits import MAX_ID_CHARACTERS
from kvtier.api.neutral_fields import invalid
from kvtier.api.passing import PassedBody, Passing, unknown_response
from kvtier.api.response_store import StoredResponse, TenantResponses
from kvtier.api.responses.encoder import Keep, ResponseEncoder
from kvtier.api.responses.history import Turn, continued
from kvtier.api.responses.record import ResponseRecord, decode_record
from kvtier.api.responses.requests import read_response
from kvtier.api.service import new_id
from kvtier.api.vllm.bodies import ReadForVllm
from kvtier.api.vllm.response_places import ResponsePlace

_MAX_LISTED = 100
_LISTED = 20


class ResponsePaths:
    """Routes of the OpenAI application. `read_for_vllm` sees each body first."""

    def __init__(self, application: Application, read_for_vllm: ReadForVllm) -> None:
        self._application = application
        self._service = application.service
        self._read_for_vllm = read_for_vllm

    def routes(self) -> list[Route]:
        return [
            Route(OPENAI_RESPONSE, self._create, methods=["POST"]),
            Route("/v1/responses/{response_id}", self._show, methods=["GET"]),
            Route("/v1/responses/{response_id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/input_items", self._list_items, methods=["GET"]),
            Route("/v1/responses/{response_id}/cancel", self._cancel, methods=["POST"]),
        ]

    async def _create(self, request: Request) -> Response:
        application = self._application
        tenant = application.open(request, "req")
        found = await application.read(request, tenant, OPENAI_RESPONSE, read_response, self._read_for_vllm)
        if isinstance(found, PassedBody):
            return await Passing(self._service, request, tenant, found).response()
        asked = application.decoded_request(found) if isinstance(found, BodyAsks) else found
        assert isinstance(asked, GenerationRequest), "only Ollama's bodies can ask for a load alone"
        request.state.id = response_id = new_id("resp").replace("-", "_")
        record = decode_record(asked.record)
        asked, turn = continued(asked, record, self._responses(tenant))
        encoder = ResponseEncoder(asked, response_id, record, self._keeper(tenant, response_id, record, turn))
        return await application.answer(request, tenant, asked, encoder)

    def _keeper(self, tenant: ApiTenant, response_id: str, record: ResponseRecord, turn: Turn | None) -> Keep | None:
        if not record.is_stored or turn is None:
            return None

        def keep(document: bytes, blocks: Sequence[AnswerBlock]) -> None:
            self._responses(tenant).add(turn.stored(response_id, document, record, blocks))

        return keep

    def _responses(self, tenant: ApiTenant) -> TenantResponses:
        return self._service.responses.of(tenant.name)

    # --- stored responses ---------------------------------------------------------------------------------------------

    async def _show(self, request: Request) -> Response:
        tenant = self._application.open(request, "req")
        if (passed := await self._passed(request, tenant)) is not None:
            return passed
        stored = self._find(request, tenant)
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            raise invalid("stream", "a complete response cannot be streamed: leave stream out")
        return self._application.json(request, stored.document)

    async def _delete(self, request: Request) -> Response:
        tenant = self._application.open(request, "req")
        if (passed := await self._passed(request, tenant)) is not None:
            return passed
        stored = self._find(request, tenant)
        self._responses(tenant).delete(stored.response_id)
        document = {"id": stored.response_id, "object": "response", "deleted": True}
        return self._application.json(request, msgspec.json.encode(document))

    async def _cancel(self, request: Request) -> Response:
        tenant = self._application.open(request, "req")
        if (passed := await self._passed(request, tenant)) is not None:
            return passed
        self._find(request, tenant)
        raise HttpError(400, "only responses with background: true can be cancelled", "invalid_value", "response_id")

    async def _list_items(self, request: Request) -> Response:
        tenant = self._application.open(request, "req")
        if (passed := await self._passed(request, tenant)) is not None:
            return passed
        stored = self._find(request, tenant)
        numbers = list(range(len(stored.items)))
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", f"order must be asc or desc, not {shown(order)}")
        if order == "desc":
            numbers.reverse()
        after = request.query_params.get("after")
        if after is not None:
            numbers = _after(numbers, stored, after)
        listed = numbers[: _limit(request.query_params.get("limit"))]
        items = [_listed_item(stored, number) for number in listed]
        document = {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else "",
            "last_id": items[-1]["id"] if items else "",
            "has_more": len(numbers) > len(listed),
        }
        return self._application.json(request, msgspec.json.encode(document))

    async def _passed(self, request: Request, tenant: ApiTenant) -> Response | None:
        """vLLM's answer about a response that one of its engines has; None for other responses."""
        response_id = request.path_params["response_id"]
        place = self._service.placed_responses.find(tenant.name, response_id) or self._only_place(tenant, response_id)
        if place is None:
            return None
        path = request.scope["path"]
        is_streamed = request.query_params.get("stream", "").lower() in ("true", "1")
        passes = BodyPasses(place.model, place.model, path, None, is_streamed=is_streamed, num_answers=1, keys=[])
        passed = PassedBody(passes, [], request.method, place.engine)
        return await Passing(self._service, request, tenant, passed).response()

    def _only_place(self, tenant: ApiTenant, response_id: str) -> ResponsePlace | None:
        """Without keys, vLLM's only engine may have a response that it has kept since before this server started."""
        engines = [(model, engine) for model in self._service.vllm.models for engine in model.engines]
        if self._service.config.keys or len(engines) != 1 or len(response_id) > MAX_ID_CHARACTERS:
            return None
        if self._responses(tenant).find(response_id) is not None:
            return None
        [(model, engine)] = engines
        return ResponsePlace(model.name, engine.name)

    def _find(self, request: Request, tenant: ApiTenant) -> StoredResponse:
        response_id = request.path_params["response_id"]
        found = None if len(response_id) > MAX_ID_CHARACTERS else self._responses(tenant).find(response_id)
        if found is None:
            raise unknown_response(response_id)
        return found


def _limit(given: str | None) -> int:
    if given is None:
        return _LISTED
    if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= _MAX_LISTED):
        raise invalid("limit", f"limit must be a whole number from 1 to {_MAX_LISTED}, not {shown(given)}")
    return int(given)


def _after(numbers: list[int], stored: StoredResponse, after: str) -> list[int]:
    for position, number in enumerate(numbers):
        if _item_id(stored, number) == after or _has_id(stored.items[number], after):
            return numbers[position + 1 :]
    raise invalid("after", f"after is {shown(after)}, which is not an input item of this response")


def _listed_item(stored: StoredResponse, number: int) -> dict[str, object]:
    item = msgspec.json.decode(stored.items[number])
    if isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": item["content"]}]
    return {"type": "message", "status": "completed", **item, "id": item.get("id") or _item_id(stored, number)}


def _item_id(stored: StoredResponse, number: int) -> str:
    return f"in_{stored.response_id.partition('_')[2]}_{number}"


def _has_id(item: bytes, item_id: str) -> bool:
    return item_id.encode() in item and msgspec.json.decode(item).get("id") == item_id
