"""The paths of Ollama's API. Models cannot be pulled, created or deleted: a deployment serves those in its file."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvtier.api.answer_form import PLAIN, AnswerForm
from kvtier.api.application import Application
from kvtier.api.body_messages import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    BodyAsks,
    BodyLoads,
)
from kvtier.api.engines import ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import NO_EMBEDDINGS, HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.ollama.models import description, description_of_vllm, running, tags
from kvtier.api.ollama.passed import OLLAMA_KINDS
from kvtier.api.ollama.requests import LATEST, LoadModel, find_model, hello_of, read_chat, read_generate
from kvtier.api.ollama.responses import INTERNAL_ERROR, ChatEncoder, GenerateEncoder, error_body
from kvtier.api.ollama.translation import Translation, embedded, vectors
from kvtier.api.passing import PassedBody
from kvtier.api.streaming import while_connected

# Clients check the version before they use a feature: schemas in `format` (0.5), `capabilities` in /api/show (0.6.4,
# below which editors refuse to work), tool calls in streams (0.8), `think` (0.9). Some later features are supported
# (`logprobs`), others are not (generated images, web search), so a later version would promise too much.
OLLAMA_VERSION = "0.9.0"
"""The version of Ollama whose API is implemented here."""

_FIXED_MODELS = "models are set in the deployment file: they cannot be pulled, pushed, created, copied or deleted"
_NOT_SERVED = (
    ("/api/pull", ["POST"], _FIXED_MODELS),
    ("/api/push", ["POST"], _FIXED_MODELS),
    ("/api/create", ["POST"], _FIXED_MODELS),
    ("/api/copy", ["POST"], _FIXED_MODELS),
    ("/api/delete", ["DELETE"], _FIXED_MODELS),
    ("/api/blobs/{digest}", ["HEAD", "POST"], _FIXED_MODELS),
)


class OllamaApplication(Application):
    """Ollama's API. Errors are ``{"error": sentence}``; the status says whose fault they are."""

    def routes(self) -> list[Route]:
        return [
            Route("/", self._root),
            Route("/api/generate", self._generate, methods=["POST"]),
            Route("/api/chat", self._chat, methods=["POST"]),
            Route("/api/tags", self._list_models),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/ps", self._list_running),
            Route("/api/version", self._version),
            *self._embedding_routes(),
            *(Route(path, self._not_served(sentence), methods=methods) for path, methods, sentence in _NOT_SERVED),
        ]

    def _embedding_routes(self) -> list[Route]:
        """Embeddings need vLLM: kvtier's own engine computes none."""
        paths = {"/api/embed": self._embed, "/api/embeddings": self._embeddings}
        if not self.service.vllm.models:
            return [Route(path, self._not_served(NO_EMBEDDINGS, 400), methods=["POST"]) for path in paths]
        return [Route(path, serve, methods=["POST"]) for path, serve in paths.items()]

    def error_body(self, error: HttpError) -> bytes:
        return error_body(error.sentence)

    def bug_sentence(self, request_id: str) -> str:
        return INTERNAL_ERROR

    async def _root(self, request: Request) -> Response:
        """Ollama's clients ask for this before anything else. It needs no API key."""
        return PlainTextResponse("Ollama is running")

    async def _generate(self, request: Request) -> Response:
        tenant = self.open(request, "ollama")
        for_vllm = OLLAMA_KINDS[OLLAMA_GENERATE]
        found = await self.read(request, tenant, OLLAMA_GENERATE, read_generate, for_vllm)
        if isinstance(found, PassedBody):
            return await Translation(self.service, request, tenant, found, is_chat=False).response()
        asked = self._asked(found)
        encoder = GenerateEncoder(asked.name, request.state.id, _form(asked))
        if isinstance(asked, LoadModel):
            return self.json(request, encoder.loaded(asked))
        return await self.answer(request, tenant, asked, encoder)

    async def _chat(self, request: Request) -> Response:
        tenant = self.open(request, "ollama")
        found = await self.read(request, tenant, OLLAMA_CHAT, read_chat, OLLAMA_KINDS[OLLAMA_CHAT])
        if isinstance(found, PassedBody):
            return await Translation(self.service, request, tenant, found, is_chat=True).response()
        asked = self._asked(found)
        encoder = ChatEncoder(asked.name, request.state.id, _form(asked))
        if isinstance(asked, LoadModel):
            return self.json(request, encoder.loaded(asked))
        return await self.answer(request, tenant, asked, encoder)

    def _asked(self, found: GenerationRequest | LoadModel | BodyAsks | BodyLoads) -> GenerationRequest | LoadModel:
        if isinstance(found, BodyLoads):
            return LoadModel(found.name, found.done_reason)
        return self.decoded_request(found) if isinstance(found, BodyAsks) else found

    async def _embed(self, request: Request) -> Response:
        passed, document, started_ns = await self._embedded(request, OLLAMA_EMBED)
        return self._document(request, embedded(document, passed.passes.name, started_ns))

    async def _embeddings(self, request: Request) -> Response:
        _, document, _ = await self._embedded(request, OLLAMA_EMBEDDINGS)
        return self._document(request, {"embedding": vectors(document)[0]})

    async def _embedded(self, request: Request, kind: str) -> tuple[PassedBody, dict[str, Any], int]:
        """Embeddings from vLLM. Raises `HttpError` for a model that kvtier's own engine runs."""
        tenant = self.open(request, "ollama")
        started_ns = time.monotonic_ns()

        def refuse(body: JsonBody, engines: ModelCatalog) -> PassedBody:
            find_model(engines, body.needed_text("model"))
            raise HttpError(400, NO_EMBEDDINGS, "unsupported")

        found = await self.read(request, tenant, kind, refuse, OLLAMA_KINDS[kind])
        assert isinstance(found, PassedBody), "only vLLM reads such a body"
        translation = Translation(self.service, request, tenant, found, is_chat=False)
        return found, await while_connected(request, translation.document()), started_ns

    async def _list_models(self, request: Request) -> Response:
        self.service.tenant(request)
        return self._document(request, tags(self.service))

    async def _list_running(self, request: Request) -> Response:
        self.service.tenant(request)
        return self._document(request, running(self.service))

    async def _show(self, request: Request) -> Response:
        self.service.tenant(request)
        body = await self.read_small(request)
        old_name = body.text("name")  # the field of older clients
        name = body.text("model") or old_name or body.needed_text("model")
        body.flag("verbose")
        body.refuse_rest()
        passed = self.service.vllm.get(name) or self.service.vllm.get(name.removesuffix(LATEST))
        if passed is not None:
            return self._document(request, description_of_vllm(passed))
        model = find_model(self.service.engines, name)
        return self._document(request, description(model, hello_of(model)))

    async def _version(self, request: Request) -> Response:
        self.service.tenant(request)
        return self._document(request, {"version": OLLAMA_VERSION})

    def _not_served(self, sentence: str, status: int = 501) -> Callable[[Request], Awaitable[Response]]:
        async def refuse(request: Request) -> Response:
            self.service.tenant(request)
            raise HttpError(status, sentence, "unsupported")

        return refuse

    def _document(self, request: Request, document: Mapping[str, object]) -> Response:
        return self.json(request, msgspec.json.encode(document))


def _form(asked: GenerationRequest | LoadModel) -> AnswerForm:
    return asked.form if isinstance(asked, GenerationRequest) else PLAIN
