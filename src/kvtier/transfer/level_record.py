"""Where the pages that an engine has stored or found are: in a server's memory, on its disk, or gone. No torch.

The server is asked about a bounded number of blocks at a time: new pages first, then the others in turn. The record is
bounded too: the oldest pages beyond the bound are forgotten, as if they were gone. Owned by one thread.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.blocks.hashing import BlockHash
from kvtier.wire.messages import LISTED_DISK, LISTED_DOWN, LISTED_MEMORY

EntryT = TypeVar("EntryT")
"""What the record's user needs to report a page to others."""

_UNSEEN_S = 30.0
"""A page that is still absent this long after it was to be stored was not stored."""


class Level(enum.Flag):
    """Where all blocks of a page are."""

    NONE = 0
    MEMORY = enum.auto()
    DISK = enum.auto()


@dataclass(frozen=True, slots=True)
class LevelChange(Generic[EntryT]):
    """A page has moved: the places it gained and lost."""

    entry: EntryT
    gained: Level
    lost: Level


@dataclass(eq=False, slots=True)
class _Page(Generic[EntryT]):
    blocks: Sequence[BlockHash]
    entry: EntryT
    added_at: float
    level: Level = Level.NONE


class LevelRecord(Generic[EntryT]):
    """Pages by key. `look` asks the server, through a client."""

    def __init__(
        self,
        look: Callable[[Sequence[BlockHash]], list[int]],
        *,
        max_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._max_blocks = max_blocks
        self._clock = clock
        self._unseen: OrderedDict[bytes, _Page[EntryT]] = OrderedDict()
        self._seen: OrderedDict[bytes, _Page[EntryT]] = OrderedDict()
        self._num_blocks = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._seen or key in self._unseen

    @property
    def num_unseen(self) -> int:
        """Pages whose place is still unknown."""
        return len(self._unseen)

    @property
    def num_pages(self) -> int:
        return len(self._seen) + len(self._unseen)

    def add(self, key: bytes, blocks: Sequence[BlockHash], entry: EntryT) -> list[LevelChange[EntryT]]:
        """Add a page that may be in the server. Returns the pages forgotten to make room."""
        self._unseen[key] = _Page(blocks, entry, self._clock())
        self._num_blocks += len(blocks)
        forgotten = []
        while self._num_blocks > self._max_blocks and self._seen:
            forgotten.append(self._forget(next(iter(self._seen))))
        while self._num_blocks > self._max_blocks and len(self._unseen) > 1:
            self._forget(next(iter(self._unseen)))
        return forgotten

    def ask(self, max_blocks: int) -> list[LevelChange[EntryT]]:
        """Ask where some pages are, with about `max_blocks` blocks at most: new pages first, then the longest unasked.

        If the server does not answer, nothing has changed.
        """
        keys = self._next_keys(max_blocks)
        flags = self._look([one for key in keys for one in self._page(key).blocks]) if keys else []
        changes: list[LevelChange[EntryT]] = []
        first = 0
        for key in keys:
            page = self._page(key)
            of_page = flags[first : first + len(page.blocks)]
            first += len(page.blocks)
            change = None if any(flag & LISTED_DOWN for flag in of_page) else self._note(key, page, _level(of_page))
            if change is not None:
                changes.append(change)
        return changes

    def start_over(self) -> None:
        """Forget where all pages are: each page found from now on is reported as a change."""
        for page in self._seen.values():
            page.level = Level.NONE
            page.added_at = self._clock()
        self._unseen |= self._seen
        self._seen = OrderedDict()

    def _page(self, key: bytes) -> _Page[EntryT]:
        return self._seen[key] if key in self._seen else self._unseen[key]

    def _next_keys(self, max_blocks: int) -> list[bytes]:
        """The pages to ask about now. They move to the end of the line."""
        keys: list[bytes] = []
        num_blocks = 0
        for pages in (self._unseen, self._seen):
            some: list[bytes] = []
            for key, page in pages.items():
                if num_blocks >= max_blocks:
                    break
                num_blocks += len(page.blocks)
                some.append(key)
            for key in some:
                pages.move_to_end(key)
            keys += some
        return keys

    def _note(self, key: bytes, page: _Page[EntryT], level: Level) -> LevelChange[EntryT] | None:
        change = LevelChange(page.entry, level & ~page.level, page.level & ~level)
        if level is Level.NONE:
            if key in self._seen or self._clock() - page.added_at > _UNSEEN_S:
                self._forget(key)
        elif key in self._unseen:
            self._seen[key] = self._unseen.pop(key)
        page.level = level
        return change if change.gained or change.lost else None

    def _forget(self, key: bytes) -> LevelChange[EntryT]:
        page = self._seen.pop(key, None) or self._unseen.pop(key)
        self._num_blocks -= len(page.blocks)
        return LevelChange(page.entry, Level.NONE, page.level)


def _level(flags: Sequence[int]) -> Level:
    level = Level.NONE
    if all(flag & LISTED_MEMORY for flag in flags):
        level |= Level.MEMORY
    if all(flag & LISTED_DISK for flag in flags):
        level |= Level.DISK
    return level
