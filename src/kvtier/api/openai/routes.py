"""OpenAI's API: the models, completions and chat completions.

Everything else under `/v1` is for models that vLLM runs, and passed on to it; without such a model it is unknown here.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.api.access import Tenant
from kvtier.api.application import Application
from kvtier.api.body_messages import OPENAI_CHAT, OPENAI_COMPLETION, BodyAsks, BodyLoads
from kvtier.api.engines import ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.openai.passed import FORM_PATHS, KNOWN_PATHS, check_served, read_form, reader_for, unknown_here
from kvtier.api.openai.requests import read_chat, read_completion
from kvtier.api.openai.responses import ChatShape, CompletionShape, ModelShape, error_body, model_list, one_model
from kvtier.api.passing import PassedBody, Passing, salt_maker
from kvtier.api.service import new_id


class OpenAiApplication(Application):
    """Every response has an id, also one to a request for no answers."""

    def routes(self) -> list[Route]:
        routes = [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        if self.service.vllm.models:
            routes += [Route(path, self._pass_form, methods=["POST"]) for path in FORM_PATHS]
            routes += [Route(path, self._pass, methods=["POST"]) for path in (*KNOWN_PATHS, "/v1/{path:path}")]
        return routes

    def request_id(self, request: Request) -> str:
        return super().request_id(request) or new_id("req")

    def error_body(self, error: HttpError) -> bytes:
        return error_body(error)

    def bug_sentence(self, request_id: str) -> str:
        return f"the server failed; its log has more about {request_id}"

    async def _chat(self, request: Request) -> Response:
        tenant = self.open(request, "chatcmpl")
        found = await self.read(request, tenant, OPENAI_CHAT, read_chat, reader_for(OPENAI_CHAT))
        if isinstance(found, PassedBody):
            return await Passing(self.service, request, tenant, found).response()
        asked = self._asked(found)
        return await self.answer(request, tenant, asked, ChatShape(asked, request.state.id))

    async def _complete(self, request: Request) -> Response:
        tenant = self.open(request, "cmpl")
        found = await self.read(request, tenant, OPENAI_COMPLETION, read_completion, reader_for(OPENAI_COMPLETION))
        if isinstance(found, PassedBody):
            return await Passing(self.service, request, tenant, found).response()
        asked = self._asked(found)
        return await self.answer(request, tenant, asked, CompletionShape(asked, request.state.id))

    def _asked(self, found: GenerationRequest | BodyAsks | BodyLoads) -> GenerationRequest:
        assert not isinstance(found, BodyLoads), "an OpenAI body asks for something"
        return self.asked_elsewhere(found) if isinstance(found, BodyAsks) else found

    async def _pass(self, request: Request) -> Response:
        """A path that only vLLM serves."""
        tenant = self.open(request, "req")
        path = request.scope["path"]
        check_served(path)

        def refuse(body: JsonBody, engines: ModelCatalog) -> PassedBody:
            raise unknown_here(body.text("model"), path, self.service.snapshot())

        found = await self.read(request, tenant, path, refuse, reader_for(path))
        assert isinstance(found, PassedBody), "only vLLM reads such a body"
        return await Passing(self.service, request, tenant, found).response()

    async def _pass_form(self, request: Request) -> Response:
        tenant: Tenant = self.open(request, "req")
        service = self.service
        pieces = await service.open_bodies.receive(request)
        salt_of = salt_maker(tenant, has_keys=bool(service.config.keys))
        passes = read_form(b"".join(pieces), request.scope["path"], service.snapshot(), salt_of)
        return await Passing(service, request, tenant, PassedBody(passes, pieces)).response()

    async def _list_models(self, request: Request) -> Response:
        self.service.tenant(request)
        return self.json(request, model_list([self._model_shape(name) for name in self.service.model_names]))

    async def _show_model(self, request: Request) -> Response:
        self.service.tenant(request)
        return self.json(request, one_model(self._model_shape(request.path_params["name"])))

    def _model_shape(self, name: str) -> ModelShape:
        """Raises `UnknownModel`."""
        passed = self.service.vllm.get(name)
        if passed is not None:
            max_model_len = passed.max_model_len
        else:
            hello = self.service.engines.find(name).hello
            max_model_len = None if hello is None else hello.max_model_len
        return ModelShape(name, int(self.service.started_at), max_model_len)
