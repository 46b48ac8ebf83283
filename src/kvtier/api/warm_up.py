"""Warms prefixes: makes chats that begin with the documents, and warms the deployment file's documents at the start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

from kvtier.api.chat.conversation import Conversation, ask
from kvtier.api.config import WarmUp
from kvtier.api.engines import KnownModel
from kvtier.api.http_error import HttpError, http_error_of, unavailable
from kvtier.api.prefixes.filling import Progress, WarmOrder
from kvtier.api.prefixes.prefix import Prefix
from kvtier.api.prefixes.record import MAX_TEXT_CHARACTERS, PrefixText
from kvtier.api.service import Service
from kvtier.engine.process.messages import ChatPrompt
from kvtier.errors import ConfigError, KvtierError

logger = logging.getLogger(__name__)

_QUESTIONS = ("What is this about?", "1. Sum it up.", "„Warum?“")
"""Questions that begin with a letter, a digit and a punctuation mark: every chat shares what these chats share."""
_LOOK_S = 0.1


def chats_with(text: PrefixText, model: KnownModel) -> list[ChatPrompt]:
    """Chats in the form that an API would make, which begin with the text and differ in their questions."""
    return [ask(Conversation(text.messages(question)), model).prompt for question in _QUESTIONS]


async def warmed(service: Service, order: WarmOrder) -> AsyncGenerator[Progress | Prefix, None]:
    """Warm a prefix with `Prefixes.warm`, until the server stops. Counts as a request."""
    if order.model.hello is None:
        raise unavailable(f"the model {order.model.name} is starting")
    with service.place(order.tenant, 1, order.text.num_characters):
        async for event in service.prefixes.warm(order, chats_with(order.text, order.model)):
            if service.is_draining:
                raise unavailable("the server is stopping")
            yield event


async def warm_at_start(service: Service) -> None:
    """Warm the prefixes of the deployment file, one after the other. Failures are logged."""
    try:
        for entry in service.config.warm:
            try:
                await _warm_one(service, entry)
            except (HttpError, KvtierError) as error:
                logger.error("warm %s: %s", entry.name, str(error))
    finally:
        service.is_warming_up = False


async def _warm_one(service: Service, entry: WarmUp) -> None:
    model = service.engines.find(entry.model)
    while not any(connection.hello is not None for connection in model.connections):
        await asyncio.sleep(_LOOK_S)
    tenant = service.access.tenant_named(entry.key)
    if tenant is None:
        raise ConfigError(f"no API key has the name {entry.key!r}")
    text = await asyncio.to_thread(_read_text, entry)
    order = WarmOrder(
        name=entry.name, model=model, text=text, tenant=tenant, pin=entry.pin, ttl_s=entry.ttl_s, force=entry.force
    )
    computed = False
    async for event in warmed(service, order):
        if isinstance(event, Prefix):
            how = "computed" if computed else "already cached"
            logger.info("warm %s: %d tokens of %s, %s", entry.name, event.tokens, event.model, how)
        else:
            computed = (
                computed or 0 < event.done_tokens < event.all_tokens or (not event.done_tokens and event.all_tokens > 0)
            )


def _read_text(entry: WarmUp) -> PrefixText:
    """Raises `ConfigError`."""
    try:
        return PrefixText(
            [_read(path) for path in entry.documents], None if entry.system is None else _read(entry.system)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(4 * MAX_TEXT_CHARACTERS + 1)
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error


def http_error(error: HttpError | KvtierError) -> HttpError:
    return error if isinstance(error, HttpError) else http_error_of(error)
