"""Fills a cache with a prefix: checks the room, has an engine compute absent blocks, and waits until all are stored."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvtier.api.access import ApiTenant
from kvtier.api.engines import ServedModel
from kvtier.api.http_error import HttpError
from kvtier.api.prefixes.book import PrefixBook
from kvtier.api.prefixes.cache import Placed, PrefixCache
from kvtier.api.prefixes.record import PrefixText
from kvtier.api.prefixes.warming import Warming
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.sizes import format_size

_Result = TypeVar("_Result")

_STORED_S = 60.0
_STORED_LOOK_S = 0.05
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOrder:
    """Put `text` into the cache of `model` as `name`, for chats of `tenant`."""

    name: str
    model: ServedModel
    text: PrefixText
    tenant: ApiTenant
    pin: bool = False
    ttl_s: float | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    done_tokens: int
    all_tokens: int


class AskCache(Protocol):
    async def __call__(self, work: Callable[[], _Result], /) -> _Result:
        """Ask a cache in a thread. Raises `HttpError` if it does not answer or refuses."""
        ...


class PrefixFilling:
    """The filling of `cache` with one prefix, the blocks `hashes`."""

    def __init__(
        self,
        order: WarmOrder,
        cache: PrefixCache,
        namespace: Namespace,
        hashes: list[BlockHash],
        book: PrefixBook,
        ask: AskCache,
    ) -> None:
        self._order = order
        self._cache = cache
        self._namespace = namespace
        self._hashes = hashes
        self._book = book
        self._ask = ask

    async def fill(self, warming: Warming) -> AsyncGenerator[Progress, None]:
        """Compute blocks until all are in the cache. Raises `HttpError` if the cache does not keep them."""
        order, cache, namespace, hashes = self._order, self._cache, self._namespace, self._hashes
        num_tokens = warming.num_tokens
        block_tokens = num_tokens // len(hashes)
        placed = await self._place()
        await self._check_room(placed)
        for number in range(_TRIES):
            first = placed.first_absent * block_tokens
            yield Progress(first, num_tokens)
            if placed.num_cached == len(hashes):
                break
            async for done in warming.compute(first, f"warm-{secrets.token_hex(12)}-{number}"):
                yield Progress(done, num_tokens)
            placed = await self._until_stored()
        if placed.num_cached < len(hashes):
            kept = f"{placed.num_cached} of {len(hashes)} blocks of {order.name}"
            raise HttpError(507, f"the cache kept only {kept}: it has too little room", "cache_full")
        await self._ask(lambda: cache.use(namespace, hashes))

    async def _place(self) -> Placed:
        return await self._ask(lambda: self._cache.place(self._namespace, self._hashes))

    async def _until_stored(self) -> Placed:
        """Wait for the engines, which store in the background, for as long as there is progress."""
        deadline = time.monotonic() + _STORED_S
        placed = await self._place()
        while placed.num_cached < len(self._hashes) and time.monotonic() < deadline:
            await asyncio.sleep(_STORED_LOOK_S)
            before = placed.num_cached
            placed = await self._place()
            if placed.num_cached != before:
                deadline = time.monotonic() + _STORED_S
        return placed

    async def _check_room(self, placed: Placed) -> None:
        """Raises `HttpError` if the prefix or its pin can never fit, or if an unforced one would evict other blocks."""
        order, num_blocks = self._order, len(self._hashes)
        slot_bytes = placed.slot_bytes or _slot_bytes(order.model)
        needed, whole = (num_blocks - placed.num_cached) * slot_bytes, num_blocks * slot_bytes
        if not needed and not order.pin:
            return
        room = await self._ask(self._cache.room)
        if order.pin and room.pinnable_bytes is not None:
            self._check_pins(whole - placed.num_pinned * slot_bytes, room.pinnable_bytes, slot_bytes)
        if needed and whole > room.usable_bytes:
            sentence = f"{order.name} needs {format_size(whole)}, the cache has {format_size(room.usable_bytes)}"
            raise HttpError(507, sentence, "cache_full")
        if needed > room.free_bytes and not order.force:
            evicted, free = format_size(needed - max(0, room.free_bytes)), format_size(max(0, room.free_bytes))
            raise HttpError(
                409,
                f"{order.name} needs {format_size(needed)}, but only {free} of the {room.level} is free: {evicted} of "
                "blocks from requests would be evicted; use --force if the prefix is worth it",
                "would_evict",
                "force",
            )

    def _check_pins(self, needed: int, pinnable: int, slot_bytes: int) -> None:
        """Raises `HttpError` if the prefix cannot be pinned, even once another of the same name is unpinned."""
        name = self._order.name
        before = self._book.get(name)
        if before is not None and before.is_pinned:
            pinnable += before.blocks * slot_bytes
        if needed > pinnable:
            sizes = f"{format_size(needed)}, but the cache may pin only {format_size(pinnable)} more"
            has_others = any(one.is_pinned and one.name != name for one in self._book)
            advice = "unpin another prefix first" if has_others else "give it more memory"
            sentence = f"to pin {name} takes {sizes}: {advice}"
            raise HttpError(507, sentence, "cannot_pin", "pin")


def _slot_bytes(model: ServedModel) -> int:
    hello = model.hello
    return 0 if hello is None or not hello.num_blocks else slot_bytes_of(hello.kv_bytes // hello.num_blocks)
