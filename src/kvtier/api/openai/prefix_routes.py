"""`/kvtier/v1/prefixes`: list, warm, pin, drop, rename; and drop a namespace. docs/prefixes.md has the contract."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.api.access import ApiTenant, salt_of
from kvtier.api.application import Application
from kvtier.api.engines import ServedModel
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, decode_body, shown
from kvtier.api.limits import INLINE_BODY_BYTES
from kvtier.api.neutral_fields import invalid
from kvtier.api.openai.responses import error_body
from kvtier.api.prefixes.book import new_file
from kvtier.api.prefixes.filling import WarmOrder
from kvtier.api.prefixes.prefix import Prefix
from kvtier.api.prefixes.record import (
    MAX_DOCUMENTS,
    MAX_MODEL_CHARACTERS,
    MAX_TTL_S,
    NAME_IN_WORDS,
    PrefixContent,
    PrefixRecord,
    PrefixText,
    is_name,
)
from kvtier.api.streaming import StreamedAnswer, while_connected
from kvtier.api.warm_up import http_error, warmed
from kvtier.blocks.hashing import HASH_BYTES, salted_root
from kvtier.errors import KvtierError
from kvtier.sizes import format_size

_PATH = "/kvtier/v1/prefixes"
_LISTED = 100
_MAX_LISTED = 1000
_MAX_BODY_BYTES = 64 << 20
_KEEP_ALIVE_S = 10.0


class PrefixPaths:
    """Routes of the OpenAI application. With API keys, each key sees its own prefixes; changes need an `admin` key."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._service = application.service

    def routes(self) -> list[Route]:
        return [
            Route(_PATH, self._list, methods=["GET"]),
            Route(_PATH, self._warm, methods=["POST"]),
            Route("/kvtier/v1/caches", self._caches, methods=["GET"]),
            Route(f"{_PATH}/{{name}}", self._show, methods=["GET"]),
            Route(f"{_PATH}/{{name}}/pin", self._pin, methods=["POST"]),
            Route(f"{_PATH}/{{name}}/unpin", self._unpin, methods=["POST"]),
            Route(f"{_PATH}/{{name}}/drop", self._drop, methods=["POST"]),
            Route(f"{_PATH}/{{name}}/rename", self._rename, methods=["POST"]),
            Route(f"{_PATH}/{{name}}/add", self._add, methods=["POST"]),
            Route("/kvtier/v1/namespaces/{namespace}/drop", self._drop_all, methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        tenant = self._service.tenant(request)
        found, is_cut = await self._service.prefixes.listed(tenant, _limit(request.query_params.get("limit")))
        return self._json(request, {"prefixes": found, "is_cut": is_cut})

    async def _caches(self, request: Request) -> Response:
        """The cache server that holds each model's blocks, for an import."""
        self._service.access.admin(request)
        return self._json(request, {"caches": self._service.prefixes.served()})

    async def _show(self, request: Request) -> Response:
        """One prefix with its block hashes, for an export, and with its text if the query has `text=true`."""
        tenant = self._service.access.admin(request)
        prefixes = self._service.prefixes
        record = prefixes.find(request.path_params["name"], tenant)
        content = await prefixes.content(record)
        document = {
            "prefix": await prefixes.shown(record),
            "root": record.root,
            "hashes": content.joined_hashes.hex(),
            "cache": prefixes.cache_of(record).address,
            "text": content.text if request.query_params.get("text") == "true" else None,
        }
        return self._json(request, document)

    async def _pin(self, request: Request) -> Response:
        return await self._keep(request, keep=True)

    async def _unpin(self, request: Request) -> Response:
        return await self._keep(request, keep=False)

    async def _keep(self, request: Request, *, keep: bool) -> Response:
        record = self._found(request)
        return self._json(request, {"prefix": await self._service.prefixes.pin(record, keep=keep)})

    async def _drop(self, request: Request) -> Response:
        record = self._found(request)
        return self._json(request, {"dropped_blocks": await self._service.prefixes.drop(record)})

    async def _drop_all(self, request: Request) -> Response:
        self._service.access.admin(request)
        dropped = await self._service.prefixes.drop_all(request.path_params["namespace"])
        return self._json(request, {"dropped_blocks": dropped})

    async def _rename(self, request: Request) -> Response:
        record = self._found(request)
        body = await self._application.read_small(request)
        name = _name(body)
        body.refuse_rest()
        return self._json(request, {"prefix": await self._service.prefixes.rename(record, name)})

    async def _add(self, request: Request) -> Response:
        """Name blocks that are already in the cache: `kvtier pack import` has put them there."""
        tenant = self._service.access.admin(request)
        name = request.path_params["name"]
        if not is_name(name):
            raise invalid("name", f"name must have {NAME_IN_WORDS}")
        body = await self._body(request)
        record, content = self._imported(body, name, tenant)
        body.refuse_rest()
        return self._json(request, {"prefix": await self._service.prefixes.add(record, content)})

    async def _warm(self, request: Request) -> Response:
        tenant = self._application.open(request, "warm")
        self._service.access.admin(request)
        body = await self._body(request)
        order = self._order(body, tenant)
        body.refuse_rest()
        chunks = self._events(order)
        try:
            await while_connected(request, anext(chunks))
        except BaseException:
            await chunks.aclose()
            raise
        headers = {"x-request-id": request.state.id}
        return StreamedAnswer(chunks, media_type="text/event-stream", headers=headers)

    async def _events(self, order: WarmOrder) -> AsyncGenerator[bytes, None]:
        """First an empty chunk, once warming can start; then progress; at the end the prefix or an error."""
        events = warmed(self._service, order)
        try:
            yield _event(await anext(events)) and b""
            coming = asyncio.ensure_future(anext(events))
            try:
                while True:
                    done, _ = await asyncio.wait({coming}, timeout=_KEEP_ALIVE_S)
                    if not done:
                        yield b": still at it\n\n"
                        continue
                    yield _event(coming.result())
                    coming = asyncio.ensure_future(anext(events))
            except StopAsyncIteration:
                pass
            except (HttpError, KvtierError) as error:
                yield b"data: " + error_body(http_error(error)) + b"\n\n"
            finally:
                coming.cancel()
                await asyncio.wait({coming})
        finally:
            await events.aclose()

    # --- bodies ------------------------------------------------------------------------------------------------------

    def _found(self, request: Request) -> PrefixRecord:
        tenant = self._service.access.admin(request)
        return self._service.prefixes.find(request.path_params["name"], tenant)

    async def _body(self, request: Request) -> JsonBody:
        body = b"".join(await self._service.open_bodies.receive(request))
        if len(body) > _MAX_BODY_BYTES:
            raise HttpError(413, f"the body is larger than {format_size(_MAX_BODY_BYTES)}", "body_too_large")
        return decode_body(body) if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(decode_body, body)

    def _order(self, body: JsonBody, tenant: ApiTenant) -> WarmOrder:
        documents = body.items("documents", MAX_DOCUMENTS) or []
        if not all(isinstance(one, str) for one in documents):
            raise body.wrong("documents", "a list of texts")
        return WarmOrder(
            name=_name(body),
            model=self._model(body),
            text=_text([str(one) for one in documents], body.text("system")),
            tenant=self._owner(body, tenant),
            pin=body.flag("pin") or False,
            ttl_s=_ttl(body),
            force=body.flag("force") or False,
        )

    def _imported(self, body: JsonBody, name: str, tenant: ApiTenant) -> tuple[PrefixRecord, PrefixContent]:
        model = self._model(body)
        self._service.prefixes.cache_for(model)
        namespace, root, joined = (_hex(body, field) for field in ("namespace", "root", "hashes"))
        if model.hello is None or model.hello.namespace != namespace.hex():
            raise invalid("namespace", f"the namespace differs from that of {model.name} in this deployment")
        if not joined or len(joined) % HASH_BYTES:
            raise body.wrong("hashes", "32-byte digests in hex, one after the other")
        text = body.inner("text")
        tenants = [self._owner(body, tenant)] if body.has("key") else self._service.access.tenants
        owner = next((one for one in tenants if salted_root(namespace, salt_of(one, "")) == root), None)  # type: ignore[arg-type]
        if owner is None:
            raise invalid(
                "root", "no API key of this deployment has the salt of this prefix: its blocks would never be hit"
            )
        num_blocks = len(joined) // HASH_BYTES
        full_tokens = num_blocks * model.hello.block_tokens
        tokens = body.whole("tokens") if body.has("tokens") else full_tokens
        if tokens is None or not full_tokens <= tokens < full_tokens + model.hello.block_tokens:
            most = full_tokens + model.hello.block_tokens - 1
            raise body.wrong("tokens", f"a whole number from {full_tokens} to {most}, for {num_blocks} blocks")
        try:
            content = PrefixContent(joined, None if text is None else _read_text(text))
            record = PrefixRecord(
                name=name,
                model=model.name,
                namespace=namespace.hex(),
                root=root.hex(),
                first=joined[:HASH_BYTES].hex(),
                key=owner.name,
                tokens=tokens,
                blocks=num_blocks,
                file=new_file(),
                has_text=text is not None,
                is_pinned=body.flag("pin") or False,
            )
        except ValueError as error:
            raise invalid("name", str(error)) from error
        return record, content

    def _model(self, body: JsonBody) -> ServedModel:
        engines = self._service.engines
        name = body.short_text("model", MAX_MODEL_CHARACTERS)
        if name is None:
            if len(engines.models) != 1:
                raise invalid("model", f"model is missing, and this deployment has more than one: {engines.known}")
            return engines.models[0]
        if self._service.vllm.get(name) is not None:
            raise invalid("model", f"model must run on kvtier's own engine: {shown(name)} runs on vLLM")
        return engines.find(name)

    def _owner(self, body: JsonBody, tenant: ApiTenant) -> ApiTenant:
        name = body.short_text("key", MAX_MODEL_CHARACTERS)
        if name is None:
            return tenant
        found = self._service.access.tenant_named(name)
        if found is None:
            raise invalid("key", f"key must be the name of an API key of the deployment, not {shown(name)}")
        return found

    def _json(self, request: Request, document: object) -> Response:
        return self._application.json(request, msgspec.json.encode(document))


def _event(event: object) -> bytes:
    document = {"prefix": event} if isinstance(event, Prefix) else event
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _name(body: JsonBody) -> str:
    name = body.needed_text("name")
    if not is_name(name):
        raise body.wrong("name", NAME_IN_WORDS)
    return name


def _text(documents: list[str], system: str | None) -> PrefixText:
    try:
        return PrefixText(documents, system)
    except ValueError as error:
        raise invalid("documents", str(error)) from error


def _read_text(body: JsonBody) -> PrefixText:
    documents = body.items("documents", MAX_DOCUMENTS) or []
    if not all(isinstance(one, str) for one in documents):
        raise body.wrong("documents", "a list of texts")
    text = _text([str(one) for one in documents], body.text("system"))
    body.refuse_rest()
    return text


def _ttl(body: JsonBody) -> float | None:
    ttl_s = body.number("ttl_s")
    if ttl_s is not None and not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_TTL_S):
        raise body.wrong("ttl_s", f"a number of seconds, more than 0 and at most {MAX_TTL_S:.0f}")
    return ttl_s


def _hex(body: JsonBody, name: str) -> bytes:
    try:
        return bytes.fromhex(body.needed_text(name))
    except ValueError as error:
        raise body.wrong(name, "bytes in hex") from error


def _limit(given: str | None) -> int:
    if given is None:
        return _LISTED
    if not (given.isascii() and given.isdigit() and len(given) < 5 and 1 <= int(given) <= _MAX_LISTED):
        raise invalid("limit", f"limit must be a whole number from 1 to {_MAX_LISTED}, not {shown(given)}")
    return int(given)
