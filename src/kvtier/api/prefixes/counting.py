"""Counts requests that begin with a prefix, whether they name it or send its text: engines compare hashes of blocks.

One event loop. The book is read in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvtier.api.engine_connection import EngineConnection
from kvtier.api.engines import Engines
from kvtier.api.prefixes.book import PrefixBook
from kvtier.api.prefixes.record import PrefixRecord
from kvtier.blocks.hashing import BlockHash

_Result = TypeVar("_Result")


class InBook(Protocol):
    async def __call__(self, work: Callable[[], _Result], /) -> _Result:
        """Call the book in a thread."""
        ...


class UseCounting:
    """Tells the engines which prefixes there are, and the book which of them were used."""

    def __init__(self, engines: Engines, book: PrefixBook, in_book: InBook, clock: Callable[[], float]) -> None:
        self._engines = engines
        self._book = book
        self._in_book = in_book
        self._clock = clock
        self._ends: dict[str, BlockHash | None] = {}
        """The hash of each prefix's last block, by file; None if its content is lost."""
        self._asking = asyncio.Lock()

    async def count(self) -> bool:
        """Ask all engines. Returns whether a prefix was used since the last call."""
        async with self._asking:
            records = list(self._book)
            if not records and not self._ends:
                return False
            await self._in_book(lambda: self._read_ends(records))
            known = [(end, record) for record in records if (end := self._ends[record.file]) is not None]
            asked = [self._ask(connection, known) for connection in self._engines.connections]
            return any(await asyncio.gather(*asked))

    def _read_ends(self, records: list[PrefixRecord]) -> None:
        """Runs in a thread for the book, once for each prefix."""
        found: dict[str, BlockHash | None] = {}
        for record in records:
            if record.file in self._ends:
                found[record.file] = self._ends[record.file]
            else:
                content = self._book.content(record)
                found[record.file] = None if content is None else content.hashes[-1]
        self._ends = found

    async def _ask(self, connection: EngineConnection, known: list[tuple[BlockHash, PrefixRecord]]) -> bool:
        hello = connection.hello
        if hello is None:
            return False
        records: dict[BlockHash, list[PrefixRecord]] = {}
        for end, record in known:
            if record.namespace == hello.namespace:
                records.setdefault(end, []).append(record)
        uses = await connection.used_prefixes(b"".join(records))
        now = self._clock()
        for used, count, ago_s in uses:
            for record in records.get(BlockHash(used), ()):
                self._book.note_hits(record, count, now - ago_s)
        return bool(uses)
