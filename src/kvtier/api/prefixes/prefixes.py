"""The named prefixes of a deployment: lists, warms, pins and drops them, and puts their text before requests' messages.

One event loop. The book's files are read and written in threads; other threads ask the cache servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from kvtier.api.access import ApiTenant, salt_of
from kvtier.api.engines import Engines, ServedModel
from kvtier.api.http_error import HttpError
from kvtier.api.prefixes.book import PrefixBook, new_file
from kvtier.api.prefixes.cache import Placed, PrefixCache
from kvtier.api.prefixes.counting import UseCounting
from kvtier.api.prefixes.filling import PrefixFilling, Progress, WarmOrder
from kvtier.api.prefixes.prefix import Prefix, prefix_of, prefix_of_namespace
from kvtier.api.prefixes.record import PrefixContent, PrefixRecord
from kvtier.api.prefixes.warming import DEFAULT_PACE, Pace, Warming, check_tokens, common_tokens
from kvtier.blocks.hashing import BlockHash, block_hashes, join_hashes, salted_root
from kvtier.blocks.namespace import Namespace
from kvtier.client.known_namespace import KnownNamespace
from kvtier.engine.process.messages import ChatPrompt, EncodedPrompt, Prompt, decode_prompt
from kvtier.errors import ConfigError, KvtierError, TierRefused
from kvtier.observe.log_limit import LogLimit

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_LOOK_EVERY_S = 2.0
_SAVE_EVERY_S = 30.0
_LISTED_S = 2.0
"""Maximum age of the values in a listing."""
_PLACED_AT_ONCE = 64


class Prefixes:
    """Call `start` and `close` in the event loop."""

    def __init__(
        self,
        engines: Engines,
        book: PrefixBook,
        caches: Mapping[str, PrefixCache],
        *,
        clock: Callable[[], float] = time.time,
        pace: Pace = DEFAULT_PACE,
    ) -> None:
        """`caches` has the cache server of each model, by the model's name."""
        self._engines = engines
        self._book = book
        self._caches = caches
        self._clock = clock
        self.pace = pace
        self._threads = ThreadPoolExecutor(4, "kvtier-prefix")
        self._readers = ThreadPoolExecutor(2, "kvtier-prefix-book")
        """Separate threads, so that requests get the text of their prefix even if a cache server hangs."""
        self._warming = asyncio.Lock()
        self._changing = asyncio.Lock()
        """Held for each change of a name and its pins, which waits for a cache server in between."""
        self._counting = UseCounting(engines, book, self._in_book, clock)
        self._placed: dict[str, tuple[float, Placed]] = {}
        self._listed: tuple[float, list[tuple[str, KnownNamespace]]] = (float("-inf"), [])
        self._is_noted = False
        self._warnings = LogLimit(logger)
        self._saved_at = clock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_after(), name="kvtier-prefixes")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(HttpError):
            await self._count_uses()
            await self._save_notes()
        for threads in (self._threads, self._readers):
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)

    # --- reading -----------------------------------------------------------------------------------------------------

    async def listed(self, tenant: ApiTenant, limit: int) -> tuple[list[Prefix], bool]:
        """Up to `limit` prefixes that `tenant` may list, and whether there are more; admins also get all namespaces.

        Keys that read data about all keys list the prefixes of all keys, too, but use only their own.
        """
        await self._count_uses()
        known = [record for record in self._book if not self._is_expired(record)]
        found = [record for record in known if tenant.reads_metrics or self._may_see(record, tenant)]
        placed = await self._place(found[:limit])
        shown = [prefix_of(record, placed.get(record.file)) for record in found[:limit]]
        if not tenant.is_admin:
            return shown, len(found) > limit
        others = await self._namespaces()
        room = limit - len(shown)
        return [*shown, *(prefix_of_namespace(model, one) for model, one in others[:room])], len(found) + len(
            others
        ) > limit

    @property
    def num_changes(self) -> int:
        """Changes of names and pins since the start: a listing of the same number has the same names."""
        return self._book.num_changes

    async def shown(self, record: PrefixRecord) -> Prefix:
        return prefix_of(record, (await self._place([record])).get(record.file))

    def served(self) -> list[dict[str, str]]:
        """The cache server of each running model that has one, and the namespace that its engines use."""
        return [
            {"model": model.name, "namespace": model.hello.namespace, "address": self._caches[model.name].address}
            for model in self._engines.models
            if model.hello is not None and model.name in self._caches
        ]

    def find(self, name: str, tenant: ApiTenant) -> PrefixRecord:
        """Raises `HttpError` for a prefix that does not exist, has expired, or is hidden from this tenant."""
        record = self._book.get(name)
        if record is None or self._is_expired(record) or not self._may_see(record, tenant):
            raise HttpError(404, f"there is no prefix called {name[:128]!r} here", "prefix_not_found", "prefix")
        return record

    async def content(self, record: PrefixRecord) -> PrefixContent:
        """Raises `HttpError` if the prefix's content file is gone."""
        found = await self._in_book(lambda: self._book.content(record))
        if found is None:
            raise HttpError(409, f"the content of the prefix {record.name} is lost: warm it again", "prefix_lost")
        return found

    def cache_of(self, record: PrefixRecord) -> PrefixCache:
        """Raises `HttpError` if the prefix's model has no cache server, or is no longer served."""
        cache = self._caches.get(record.model)
        if cache is None:
            raise HttpError(409, f"the model {record.model} of the prefix {record.name} has no cache", "no_cache")
        return cache

    def cache_for(self, model: ServedModel) -> PrefixCache:
        """Raises `HttpError` for a model without a cache server."""
        cache = self._caches.get(model.name)
        if cache is None:
            sentence = f"the model {model.name} has no cache server: give the deployment a cache"
            raise HttpError(400, sentence, "no_cache", "model")
        return cache

    # --- changing ----------------------------------------------------------------------------------------------------

    async def pin(self, record: PrefixRecord, *, keep: bool) -> Prefix:
        """Pin or unpin the prefix. Raises `HttpError` with the cache's own sentence if it refuses.

        If that fails, the pins are as before.
        """
        async with self._changing:
            record = await self._current(record)
            cache, content = self.cache_of(record), await self.content(record)
            hashes = content.hashes
            if not keep:
                hashes = await self._own(record, hashes, among=self._pinned())
            try:
                if hashes:
                    await self._ask(lambda: cache.pin(record.namespace_bytes, hashes, keep=keep))
                changed = await self._in_book(lambda: self._book.change(record, is_pinned=keep))
            except HttpError:
                await self._restore_pins(msgspec.structs.replace(record, is_pinned=keep), content, record)
                raise
            finally:
                self._forget_places()
        return await self.shown(changed)

    async def drop(self, record: PrefixRecord) -> int:
        """Drop the name with its pin, and its blocks, except for those that other prefixes share.

        Returns how many blocks were dropped.
        """
        async with self._changing:
            record = await self._current(record)
            cache = self._caches.get(record.model)
            content = await self._in_book(lambda: self._book.content(record))
            count = 0
            try:
                if cache is not None and content is not None:
                    count = await self._drop_blocks(cache, record, content.hashes)
                await self._in_book(lambda: self._book.remove(record))
            finally:
                self._forget_places()
        return count

    async def drop_all(self, namespace: str) -> int:
        """Drop all that the models' caches have of a namespace. Names stay, without their blocks and pins.

        Returns how many blocks were dropped. Raises `HttpError` if no cache knows the namespace.
        """
        async with self._changing:
            try:
                found = [await self._ask(partial(cache.drop_all, namespace)) for cache in self._servers()]
            finally:
                self._forget_places()
        counts = [count for count in found if count is not None]
        if not counts:
            raise HttpError(404, f"no cache here has a namespace {namespace[:64]!r}", "namespace_not_found")
        return sum(counts)

    async def rename(self, record: PrefixRecord, name: str) -> Prefix:
        """Raises `HttpError` if the name is taken."""
        async with self._changing:
            renamed = await self._in_book(lambda: self._book.rename(record, name))
        return await self.shown(renamed)

    async def add(self, record: PrefixRecord, content: PrefixContent) -> Prefix:
        """Add a prefix whose blocks are already in the cache, such as after an import.

        One that replaces a pinned prefix of the same name is pinned, too. If that fails, the pins are as before. It is
        completed even if the caller is cancelled.
        """
        added = await _completed(self._add(record, content))
        await self._count_uses()
        return await self.shown(added)

    async def end_expired(self) -> None:
        """Remove expired names and unpin their blocks. Called periodically."""
        for record in filter(self._is_expired, self._book):
            try:
                await self._end(record.name)
            except (KvtierError, HttpError) as error:  # such as a cache that does not answer: tried again later
                self._warnings.warning(
                    record.name, "the prefix %s has expired but could not be removed: %s", record.name, str(error)
                )

    async def warm(self, order: WarmOrder, prompts: Sequence[ChatPrompt]) -> AsyncGenerator[Progress | Prefix, None]:
        """Yields progress, and at the end the prefix. Raises `HttpError` or `KvtierError` with one sentence.

        `prompts` are chats that begin with the text and differ in their questions. One prefix is warmed at a time. If
        warming is aborted, the blocks computed so far stay cached, without a name. A pinned name stays pinned.
        """
        cache = self.cache_for(order.model)
        await self._in_book(lambda: self._book.check_room(order.name))
        yield Progress(0, 0)
        async with self._warming:
            known = self._book.get(order.name)
            if known is not None and known.is_pinned and not self._is_expired(known):
                order = replace(order, pin=True)
            tokens = await common_tokens(self._engines, order.model, prompts)
            num_blocks = check_tokens(tokens, order.model)
            hello = order.model.hello
            assert hello is not None
            namespace = Namespace(bytes.fromhex(hello.namespace))
            salt = salt_of(order.tenant, "")
            root = salted_root(namespace, salt)
            full = tokens[: num_blocks * hello.block_tokens]
            hashes = await self._in_thread(lambda: block_hashes(root, full, hello.block_tokens))
            filling = PrefixFilling(order, cache, namespace, hashes, self._book, self._ask)
            async for progress in filling.fill(Warming(self._engines, order.model, full, salt, self.pace)):
                yield progress
            record = PrefixRecord(
                name=order.name,
                model=order.model.name,
                namespace=namespace.hex(),
                root=root.hex(),
                first=hashes[0].hex(),
                key=order.tenant.name,
                tokens=len(tokens),
                blocks=num_blocks,
                file=new_file(),
                has_text=True,
                is_pinned=order.pin,
                expires_at=None if order.ttl_s is None else self._clock() + order.ttl_s,
            )
            yield await self.add(record, PrefixContent(join_hashes(hashes), order.text))

    # --- requests that name a prefix ---------------------------------------------------------------------------------

    async def before(self, name: str, model: str, prompt: Prompt | EncodedPrompt, tenant: ApiTenant) -> ChatPrompt:
        """The conversation with the text of the prefix before it. Raises `HttpError` if the two do not fit."""
        record = self.find(name, tenant)
        if record.model != model:
            raise _wrong(f"the prefix {name} belongs to the model {record.model}, not to {model}")
        text = (await self.content(record)).text
        if text is None:
            raise _wrong(f"the prefix {name} was imported without its text: send the document itself")
        if isinstance(prompt, EncodedPrompt):
            encoded = prompt.encoded
            prompt = await self._in_thread(lambda: decode_prompt(encoded))
        if not isinstance(prompt, ChatPrompt):
            raise _wrong("prefix is supported in conversations only")
        first = prompt.messages[0]
        if first.role != "user":
            raise _wrong(
                f"with prefix the first message must have the role user, not {first.role[:32]!r}: a system message is "
                "part of the prefix, given when it is warmed"
            )
        begun = text.messages(first.content)
        begun[-1] = msgspec.structs.replace(first, content=begun[-1].content)
        return msgspec.structs.replace(prompt, messages=[*begun, *prompt.messages[1:]])

    # --- private -----------------------------------------------------------------------------------------------------

    def _may_see(self, record: PrefixRecord, tenant: ApiTenant) -> bool:
        """An admin sees all prefixes; other tenants see those of their own salt."""
        return tenant.is_admin or record.root == salted_root(record.namespace_bytes, salt_of(tenant, "")).hex()

    async def _place(self, records: Sequence[PrefixRecord]) -> dict[str, Placed]:
        """Where the prefixes' blocks are, by file; without those whose cache server does not answer."""
        now = time.monotonic()
        found: dict[str, Placed] = {}
        unknown: dict[PrefixCache, list[PrefixRecord]] = {}
        for record in records:
            known = self._placed.get(record.file)
            if known is not None and now - known[0] < _LISTED_S:
                found[record.file] = known[1]
            elif (cache := self._caches.get(record.model)) is not None:
                unknown.setdefault(cache, []).append(record)
        for cache, some in unknown.items():
            with contextlib.suppress(KvtierError):
                for first in range(0, len(some), _PLACED_AT_ONCE):
                    found |= await self._ask_for_places(cache, some[first : first + _PLACED_AT_ONCE])
        return found

    async def _add(self, record: PrefixRecord, content: PrefixContent) -> PrefixRecord:
        async with self._changing:
            before = self._book.get(record.name)
            if before is not None:
                if not self._is_expired(before):
                    record = _replacing(before, record)
                with contextlib.suppress(KvtierError, HttpError):
                    await self._unpin(before)
            try:
                if record.is_pinned:
                    cache = self.cache_of(record)
                    await self._ask(lambda: cache.pin(record.namespace_bytes, content.hashes, keep=True))
                return await self._in_book(lambda: self._book.add(record, content))
            except HttpError:
                await self._restore_pins(record, content, before)
                raise
            finally:
                self._forget_places()

    async def _restore_pins(self, record: PrefixRecord, content: PrefixContent, before: PrefixRecord | None) -> None:
        """Unpin the blocks of `record`, which could not be stored, and pin those of `before`, which it replaces."""
        with contextlib.suppress(KvtierError, HttpError):
            await self._unpin(record, content)
        if before is None or not before.is_pinned:
            return
        with contextlib.suppress(KvtierError, HttpError):
            cache, hashes = self.cache_of(before), (await self.content(before)).hashes
            await self._ask(lambda: cache.pin(before.namespace_bytes, hashes, keep=True))

    async def _drop_blocks(self, cache: PrefixCache, record: PrefixRecord, hashes: list[BlockHash]) -> int:
        """Drop the blocks that no other prefix has, and unpin those that no other pinned one has."""
        own = await self._own(record, hashes, among=list(self._book))
        pinned = await self._own(record, hashes, among=self._pinned()) if record.is_pinned else []

        def drop() -> int:
            if pinned:
                cache.pin(record.namespace_bytes, pinned, keep=False)
            return cache.drop(record.namespace_bytes, own) if own else 0

        return await self._ask(drop)

    async def _current(self, record: PrefixRecord) -> PrefixRecord:
        """The record as it is now. Raises `HttpError` if the prefix was dropped while a change of it waited."""
        return await self._in_book(lambda: self._book.current(record))

    def _forget_places(self) -> None:
        """Have the next listing ask the caches, as something has changed; answers on their way count as older."""
        self._placed = {}
        self._listed = (float("-inf"), [])

    def _pinned(self) -> list[PrefixRecord]:
        return [record for record in self._book if record.is_pinned]

    async def _ask_for_places(self, cache: PrefixCache, records: Sequence[PrefixRecord]) -> dict[str, Placed]:
        """Raises `KvtierError` if the cache does not answer."""

        def hashes() -> list[tuple[str, Namespace, list[BlockHash]]]:
            contents = ((record, self._book.content(record)) for record in records)  # one text in memory at a time
            return [
                (record.file, record.namespace_bytes, content.hashes)
                for record, content in contents
                if content is not None
            ]

        known = self._placed
        asked = await self._in_book(hashes)
        placed = await self._in_thread(lambda: cache.places([(namespace, own) for _, namespace, own in asked]))
        found = {file: one for (file, _, _), one in zip(asked, placed, strict=True)}
        if len(known) > 2 * len(self._book):
            known.clear()
        known |= {file: (time.monotonic(), one) for file, one in found.items()}
        return found

    async def _namespaces(self) -> list[tuple[str, KnownNamespace]]:
        """The namespaces in the models' caches, each with the models that use it now, or its own name."""
        before = asked_at, found = self._listed
        if time.monotonic() - asked_at < _LISTED_S:
            return found
        users: dict[str, list[str]] = {}
        for model in self._engines.models:
            if model.hello is not None:
                users.setdefault(model.hello.namespace, []).append(model.name)
        used = {namespace: ", ".join(names) for namespace, names in users.items()}
        found = []
        for cache in self._servers():
            with contextlib.suppress(KvtierError):
                known = await self._in_thread(cache.namespaces)
                found += [(used.get(one.digest, one.name), one) for one in known if one.blocks or one.disk_blocks]
        if self._listed is before:
            self._listed = (time.monotonic(), found)
        return found

    def _servers(self) -> list[PrefixCache]:
        """Each cache server once: models share them."""
        return list({cache.address: cache for cache in self._caches.values()}.values())

    async def _unpin(self, record: PrefixRecord, content: PrefixContent | None = None) -> None:
        """Unpin the prefix's blocks. Raises `KvtierError` while the cache does not answer."""
        cache = self._caches.get(record.model)
        if not record.is_pinned or cache is None:
            return
        content = content or await self._in_book(lambda: self._book.content(record))
        if content is None:
            return
        hashes = await self._own(record, content.hashes, among=self._pinned())
        if hashes:
            with contextlib.suppress(TierRefused):  # the cache no longer has these blocks
                await self._in_thread(lambda: cache.pin(record.namespace_bytes, hashes, keep=False))

    async def _own(
        self, record: PrefixRecord, hashes: list[BlockHash], *, among: Iterable[PrefixRecord]
    ) -> list[BlockHash]:
        """The hashes that no other prefix in `among` has: chains that share blocks share their beginning."""
        others = [other for other in among if other.file != record.file and other.first == record.first]

        def num_shared() -> int:
            contents = (self._book.content(other) for other in others)
            return max((_num_same(hashes, content.hashes) for content in contents if content is not None), default=0)

        return hashes[await self._in_book(num_shared) :]

    async def _look_after(self) -> None:
        """Remove expired prefixes, count uses and save hits, periodically."""
        while True:
            await self.end_expired()
            try:
                await self._count_uses()
                if self._clock() - self._saved_at >= _SAVE_EVERY_S:
                    await self._save_notes()
            except HttpError as error:
                self._warnings.warning("save", "%s", str(error))
            await asyncio.sleep(_LOOK_EVERY_S)

    def _is_expired(self, record: PrefixRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self._clock()

    async def _end(self, name: str) -> None:
        async with self._changing:
            record = self._book.get(name)
            if record is None or not self._is_expired(record):
                return  # it was dropped, or warmed again
            await self._unpin(record)
            await self._in_book(lambda: self._book.remove(record))
            self._forget_places()
        logger.info("the prefix %s has expired", name)

    async def _count_uses(self) -> None:
        self._is_noted |= await self._counting.count()

    async def _save_notes(self) -> None:
        self._saved_at = self._clock()
        if self._is_noted:
            self._is_noted = False
            await self._in_book(self._book.save)

    async def _ask(self, work: Callable[[], _Result]) -> _Result:
        """Ask a cache in a thread. Raises `HttpError` if it does not answer or refuses."""
        try:
            return await self._in_thread(work)
        except KvtierError as error:
            raise HttpError(409, f"the cache refuses: {error}", "cache_refused") from error

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _in_book(self, work: Callable[[], _Result]) -> _Result:
        """Call the book in a thread. Raises `HttpError` with the book's own sentence if it refuses."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, work)
        except ConfigError as error:
            raise HttpError(409, str(error), "prefix_refused") from error


def _replacing(before: PrefixRecord, record: PrefixRecord) -> PrefixRecord:
    """The record that takes the name of `before`: with its pin and, if chats with the same salt use it, its hits."""
    record = msgspec.structs.replace(record, is_pinned=record.is_pinned or before.is_pinned)
    if before.root != record.root:
        return record
    return msgspec.structs.replace(record, hits=before.hits, last_used=before.last_used)


async def _completed(change: Coroutine[None, None, _Result]) -> _Result:
    """Await a change that must not stop halfway: if the caller is cancelled, it is completed first."""
    task = asyncio.ensure_future(change)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _num_same(ours: Sequence[BlockHash], theirs: Sequence[BlockHash]) -> int:
    num_same = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        num_same += 1
    return num_same


def _wrong(sentence: str) -> HttpError:
    return HttpError(400, sentence, "invalid_value", "prefix")
