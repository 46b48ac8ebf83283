"""The paths of OpenAI's API (models, completions, chats, responses), of Anthropic's messages, and vLLM's for tokens.

All other paths under `/v1` are passed on to vLLM; they are unknown if vLLM runs no model of the deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvtier.api.access import ApiTenant
from kvtier.api.anthropic.routes import PATHS as ANTHROPIC_PATHS
from kvtier.api.anthropic.routes import MessagePaths, has_message_errors
from kvtier.api.application import Application
from kvtier.api.body_messages import (
    DETOKENIZE,
    OPENAI_CHAT,
    OPENAI_COMPLETION,
    OPENAI_RESPONSE,
    TOKENIZE,
    BodyAsks,
    BodyLoads,
)
from kvtier.api.engines import ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import NO_EMBEDDINGS, HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.openai.passed import FORM_PATHS, KNOWN_PATHS, check_served, read_form, reader_for, unknown_here
from kvtier.api.openai.prefix_routes import PrefixPaths
from kvtier.api.openai.requests import read_chat, read_completion
from kvtier.api.openai.responses import ChatEncoder, CompletionEncoder, ModelDocument, error_body, model_list, one_model
from kvtier.api.openai.tokenizing import ReadTokens, read_detokenize, read_tokenize, token_list, token_text
from kvtier.api.page.deployment_view import DeploymentView
from kvtier.api.page.guard import PageGuard
from kvtier.api.page.page import Page
from kvtier.api.page.sessions import Sessions
from kvtier.api.passing import PassedBody, Passing, salt_maker
from kvtier.api.prompt_length import prompt_bytes
from kvtier.api.responses.routes import ResponsePaths
from kvtier.api.service import Service, new_id
from kvtier.api.streaming import while_connected
from kvtier.api.web_guard import WebRules
from kvtier.engine.process.messages import EncodedPrompt, TokenPrompt, decode_prompt


class OpenAiApplication(Application):
    """Every response has an id, even if its request generates nothing."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._responses = ResponsePaths(self, reader_for(OPENAI_RESPONSE))
        self._messages = MessagePaths(self, {path: reader_for(path) for path in ANTHROPIC_PATHS})
        self._page = self._make_page()

    def routes(self) -> list[Route]:
        routes = [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            *self._responses.routes(),
            *self._messages.routes(),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            *PrefixPaths(self).routes(),
            *(() if self._page is None else self._page.routes()),
        ]
        if not self.service.vllm.models:
            return [*routes, Route("/v1/embeddings", self._refuse_embeddings, methods=["POST"])]
        routes += [Route(path, self._pass_form, methods=["POST"]) for path in FORM_PATHS]
        return [*routes, *(Route(path, self._pass, methods=["POST"]) for path in (*KNOWN_PATHS, "/v1/{path:path}"))]

    def guarded(self, app: ASGIApp, rules: WebRules) -> ASGIApp:
        """Browsers can change prefixes only through the page; without a page they cannot."""
        guard = PageGuard(self.service.access, Sessions()) if self._page is None else self._page
        return super().guarded(guard.guarded(app, self.refuse), rules)

    def _make_page(self) -> Page | None:
        service = self.service
        if service.config.page is None:
            return None
        page = Page(DeploymentView(service), service.access, service.config.page)
        service.at_end.append(page.close)
        return page

    def request_id(self, request: Request) -> str:
        return super().request_id(request) or new_id("req")

    def error_body(self, error: HttpError) -> bytes:
        return error_body(error)

    def error_body_for(self, request: Request, error: HttpError) -> bytes:
        """Errors of Anthropic's paths have Anthropic's form."""
        if not has_message_errors(request.url.path):
            return self.error_body(error)
        request.state.id = self.request_id(request)
        return self._messages.error_body(request, error)

    def error_headers(self, request: Request) -> Mapping[str, str]:
        return {"request-id": self.request_id(request)} if has_message_errors(request.url.path) else {}

    def bug_sentence(self, request_id: str) -> str:
        return f"the server failed; see its log for {request_id}"

    async def _chat(self, request: Request) -> Response:
        tenant = self.open(request, "chatcmpl")
        found = await self.read(request, tenant, OPENAI_CHAT, read_chat, reader_for(OPENAI_CHAT))
        if isinstance(found, PassedBody):
            return await Passing(self.service, request, tenant, found).response()
        asked = self._asked(found)
        return await self.answer(request, tenant, asked, ChatEncoder(asked, request.state.id))

    async def _complete(self, request: Request) -> Response:
        tenant = self.open(request, "cmpl")
        found = await self.read(request, tenant, OPENAI_COMPLETION, read_completion, reader_for(OPENAI_COMPLETION))
        if isinstance(found, PassedBody):
            return await Passing(self.service, request, tenant, found).response()
        asked = self._asked(found)
        return await self.answer(request, tenant, asked, CompletionEncoder(asked, request.state.id))

    async def _tokenize(self, request: Request) -> Response:
        return await self._about_tokens(request, TOKENIZE, read_tokenize, self._tokens_of)

    async def _detokenize(self, request: Request) -> Response:
        return await self._about_tokens(request, DETOKENIZE, read_detokenize, self._text_of)

    async def _about_tokens(
        self,
        request: Request,
        kind: str,
        read: ReadTokens,
        answer: Callable[[GenerationRequest], Coroutine[Any, Any, bytes]],
    ) -> Response:
        tenant = self.open(request, "req")
        found = await self.read(request, tenant, kind, read, reader_for(kind))
        if isinstance(found, PassedBody):
            return await Passing(self.service, request, tenant, found).response()
        asked = self._asked(found)
        with self.service.place(tenant, 1, sum(map(prompt_bytes, asked.prompts))):
            return self.json(request, await while_connected(request, answer(asked)))

    async def _tokens_of(self, asked: GenerationRequest) -> bytes:
        engines, with_texts = self.service.engines, asked.prompt_form.has_token_texts
        model = engines.find(asked.model.name)
        found = await engines.tokenized(model, asked.prompts[0], with_texts=with_texts)
        max_model_len = None if model.hello is None else model.hello.max_model_len
        return token_list(found.token_ids, found.texts if with_texts else None, max_model_len)

    async def _text_of(self, asked: GenerationRequest) -> bytes:
        engines, [prompt] = self.service.engines, asked.prompts
        tokens = decode_prompt(prompt.encoded) if isinstance(prompt, EncodedPrompt) else prompt
        assert isinstance(tokens, TokenPrompt)
        model = engines.find(asked.model.name)
        return token_text(await engines.detokenize(model, tokens.token_ids, skip_special_tokens=False))

    def _asked(self, found: GenerationRequest | BodyAsks | BodyLoads) -> GenerationRequest:
        assert not isinstance(found, BodyLoads), "only Ollama's bodies can ask for a load alone"
        return self.decoded_request(found) if isinstance(found, BodyAsks) else found

    async def _refuse_embeddings(self, request: Request) -> Response:
        self.service.tenant(request)
        raise HttpError(400, NO_EMBEDDINGS, "unsupported")

    async def _pass(self, request: Request) -> Response:
        """Pass a request on to vLLM, which alone serves this path."""
        tenant = self.open(request, "req")
        path = request.scope["path"]
        check_served(path)

        def refuse(body: JsonBody, engines: ModelCatalog) -> PassedBody:
            raise unknown_here(body.text("model"), path, self.service.snapshot())

        found = await self.read(request, tenant, path, refuse, reader_for(path))
        assert isinstance(found, PassedBody), "only vLLM reads such a body"
        return await Passing(self.service, request, tenant, found).response()

    async def _pass_form(self, request: Request) -> Response:
        tenant: ApiTenant = self.open(request, "req")
        service = self.service
        pieces = await service.open_bodies.receive(request)
        salt_of = salt_maker(tenant, has_keys=bool(service.config.keys))
        passes = read_form(b"".join(pieces), request.scope["path"], service.snapshot(), salt_of)
        return await Passing(service, request, tenant, PassedBody(passes, pieces)).response()

    async def _list_models(self, request: Request) -> Response:
        self.service.tenant(request)
        return self.json(request, model_list([self._model_document(name) for name in self.service.model_names]))

    async def _show_model(self, request: Request) -> Response:
        self.service.tenant(request)
        return self.json(request, one_model(self._model_document(request.path_params["name"])))

    def _model_document(self, name: str) -> ModelDocument:
        """Raises `UnknownModel`."""
        passed = self.service.vllm.get(name)
        if passed is not None:
            max_model_len = passed.max_model_len
        else:
            hello = self.service.engines.find(name).hello
            max_model_len = None if hello is None else hello.max_model_len
        return ModelDocument(name, int(self.service.started_at), max_model_len)
