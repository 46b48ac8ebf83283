"""OpenAI's API: the models, completions and chat completions. Everything else under `/v1` is unknown here."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.api.application import Application
from kvtier.api.body_messages import OPENAI_CHAT, OPENAI_COMPLETION, BodyAsks, BodyLoads
from kvtier.api.engines import ServedModel
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.openai.requests import read_chat, read_completion
from kvtier.api.openai.responses import ChatShape, CompletionShape, ModelShape, error_body, model_list, one_model
from kvtier.api.service import new_id


class OpenAiApplication(Application):
    """Every response has an id, also one to a request for no answers."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]

    def request_id(self, request: Request) -> str:
        return super().request_id(request) or new_id("req")

    def error_body(self, error: HttpError) -> bytes:
        return error_body(error)

    def bug_sentence(self, request_id: str) -> str:
        return f"the server failed; its log has more about {request_id}"

    async def _chat(self, request: Request) -> Response:
        tenant = self.open(request, "chatcmpl")
        asked = self._asked(await self.read(request, OPENAI_CHAT, read_chat))
        return await self.answer(request, tenant, asked, ChatShape(asked, request.state.id))

    async def _complete(self, request: Request) -> Response:
        tenant = self.open(request, "cmpl")
        asked = self._asked(await self.read(request, OPENAI_COMPLETION, read_completion))
        return await self.answer(request, tenant, asked, CompletionShape(asked, request.state.id))

    def _asked(self, found: GenerationRequest | BodyAsks | BodyLoads) -> GenerationRequest:
        assert not isinstance(found, BodyLoads), "an OpenAI body asks for something"
        return self.asked_elsewhere(found) if isinstance(found, BodyAsks) else found

    async def _list_models(self, request: Request) -> Response:
        self.service.tenant(request)
        models = [self._model_shape(model.name, model) for model in self.service.engines.models]
        return self.json(request, model_list(models))

    async def _show_model(self, request: Request) -> Response:
        self.service.tenant(request)
        name = request.path_params["name"]
        return self.json(request, one_model(self._model_shape(name, self.service.engines.find(name))))

    def _model_shape(self, name: str, model: ServedModel) -> ModelShape:
        hello = model.hello
        return ModelShape(name, int(self.service.started_at), None if hello is None else hello.max_model_len)
