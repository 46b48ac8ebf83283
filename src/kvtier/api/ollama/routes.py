"""Ollama's API: its paths. Models cannot be pulled, made or removed: a deployment serves those of its file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvtier import __version__
from kvtier.api.application import Application
from kvtier.api.body_messages import OLLAMA_CHAT, OLLAMA_GENERATE, BodyAsks, BodyLoads
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.ollama.models import description, running, tags
from kvtier.api.ollama.requests import LoadModel, find_model, hello_of, read_chat, read_generate
from kvtier.api.ollama.responses import INTERNAL_ERROR, ChatShape, GenerateShape, error_body

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


class OllamaApplication(Application):
    """Its errors are ``{"error": sentence}``, with the status that says whose fault it is."""

    def routes(self) -> list[Route]:
        return [
            Route("/", self._root),
            Route("/api/generate", self._generate, methods=["POST"]),
            Route("/api/chat", self._chat, methods=["POST"]),
            Route("/api/tags", self._list_models),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/ps", self._list_running),
            Route("/api/version", self._version),
            *(Route(path, self._not_served(sentence), methods=methods) for path, methods, sentence in _NOT_SERVED),
        ]

    def error_body(self, error: HttpError) -> bytes:
        return error_body(error.sentence)

    def bug_sentence(self, request_id: str) -> str:
        return INTERNAL_ERROR

    async def _root(self, request: Request) -> Response:
        """What Ollama's own clients look for before anything else; it needs no key."""
        return PlainTextResponse("Ollama is running")

    async def _generate(self, request: Request) -> Response:
        tenant = self.open(request, "ollama")
        asked = self._asked(await self.read(request, OLLAMA_GENERATE, read_generate))
        shape = GenerateShape(asked.name, request.state.id)
        if isinstance(asked, LoadModel):
            return self.json(request, shape.loaded(asked))
        return await self.answer(request, tenant, asked, shape)

    async def _chat(self, request: Request) -> Response:
        tenant = self.open(request, "ollama")
        asked = self._asked(await self.read(request, OLLAMA_CHAT, read_chat))
        shape = ChatShape(asked.name, request.state.id)
        if isinstance(asked, LoadModel):
            return self.json(request, shape.loaded(asked))
        return await self.answer(request, tenant, asked, shape)

    def _asked(self, found: GenerationRequest | LoadModel | BodyAsks | BodyLoads) -> GenerationRequest | LoadModel:
        if isinstance(found, BodyLoads):
            return LoadModel(found.name, found.done_reason)
        return self.asked_elsewhere(found) if isinstance(found, BodyAsks) else found

    async def _list_models(self, request: Request) -> Response:
        self.service.tenant(request)
        return self._document(request, tags(self.service))

    async def _list_running(self, request: Request) -> Response:
        self.service.tenant(request)
        return self._document(request, running(self.service))

    async def _show(self, request: Request) -> Response:
        self.service.tenant(request)
        body = await self.read_small(request)
        old_name = body.text("name")  # as older clients say it
        model = find_model(self.service.engines, body.text("model") or old_name or body.needed_text("model"))
        body.flag("verbose")
        body.refuse_rest()
        return self._document(request, description(model, hello_of(model)))

    async def _version(self, request: Request) -> Response:
        self.service.tenant(request)
        return self._document(request, {"version": __version__})

    def _not_served(self, sentence: str) -> Callable[[Request], Awaitable[Response]]:
        async def refuse(request: Request) -> Response:
            self.service.tenant(request)
            raise HttpError(501, sentence, "unsupported")

        return refuse

    def _document(self, request: Request, document: Mapping[str, object]) -> Response:
        return self.json(request, msgspec.json.encode(document))
