"""KV events for routers, in vLLM's own format: where the cache server has blocks of this engine's prompts.

The scheduler's thread notes pages that are saved or matched. Another thread asks the server where they are, for as long
as they are tracked (`transfer/level_record`), and makes events of the changes; the scheduler's thread passes them to
vLLM with its next step. Routers know vLLM's own media and drop events of others, so memory is `CPU` and
disk `STORAGE`; `ownership` is `kvtier`. As in vLLM's own events, every group of layers has events of its own.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.errors import KvtierError
from kvtier.observe.log_limit import LogLimit
from kvtier.plugins.vllm.compat import event_extra_keys, kind_of, made_with_known, window_of
from kvtier.plugins.vllm.identity import Identity
from kvtier.transfer.block_groups import BlockGroups
from kvtier.transfer.level_record import Level, LevelChange, LevelRecord

logger = logging.getLogger(__name__)

OWNER = "kvtier"
MEDIA = {Level.MEMORY: MEDIUM_CPU, Level.DISK: "STORAGE"}

_MAX_BLOCKS = 65_536
_ASKED_AT_ONCE = 512
"""Blocks: about a millisecond of a thread's time."""
_NEW_S, _KNOWN_S = 0.1, 0.5
"""Intervals between questions to the server, with and without new pages. Each page has its turn within a minute."""
_ADDED_AT_ONCE = 128
_PAUSE_S = 1e-5
"""After half a millisecond of work, pause for the scheduler's thread."""
_MAX_NOTES = 1024
_MAX_WAITING = 4096
"""Limit on events that wait for a step; while there are more, the server is not asked."""
_TAKEN_AT_ONCE = 256
_EVENT_PAGES = 64


@dataclass(frozen=True, slots=True)
class PageGroup:
    """A group of layers whose pages have `page_tokens`. `described` is what its events say of it.

    `blocks_of` returns the server's blocks of a page, given the hashes of the prompt's blocks and the page's number.
    """

    page_tokens: int
    described: Mapping[str, Any]
    blocks_of: Callable[[Sequence[BlockHash], int], Sequence[BlockHash]]


@dataclass(frozen=True, slots=True)
class _Note:
    """Tokens of a prompt whose pages may be in the server. `pages` are vLLM's hashes, `hashes` those of our blocks."""

    request: Request
    pages: Sequence[bytes]
    hashes: Sequence[BlockHash]
    first_token: int
    end_token: int


class _StartOver:
    """Routers have discarded all earlier events."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The fields of an event about a page."""

    group: PageGroup
    page: bytes
    parent: bytes | None
    tokens: list[int]
    extra_keys: tuple[Any, ...] | None
    lora: tuple[int, str] | None


def server_events(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, client: CacheClient, identity: Identity
) -> ServerEvents | None:
    """The events of an engine. None if vLLM publishes no events."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    groups = _page_groups(kv_cache_config, identity)
    return ServerEvents(client, groups, hash_tokens=identity.page_tokens, block_tokens=identity.layout.block_tokens)


def _page_groups(kv_cache_config: KVCacheConfig, identity: Identity) -> list[PageGroup]:
    block_tokens = identity.layout.block_tokens
    block_groups = identity.block_groups
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        page_tokens = block_groups.reaches[number].block_tokens
        described = {
            "block_size": page_tokens,
            "group_idx": number,
            "kv_cache_spec_kind": kind_of(group.kv_cache_spec),
            "kv_cache_spec_sliding_window": window_of(group.kv_cache_spec),
        }
        if block_groups.is_one_full:
            groups.append(
                PageGroup(page_tokens, described, functools.partial(blocks_between, page_tokens, block_tokens))
            )
        else:
            groups.append(PageGroup(page_tokens, described, functools.partial(_block_in, block_groups, number)))
    return groups


def blocks_between(page_tokens: int, block_tokens: int, hashes: Sequence[BlockHash], page: int) -> Sequence[BlockHash]:
    """The blocks that have the tokens of a page, which may be larger or smaller than a block."""
    first = page * page_tokens // block_tokens
    end = -(-(page + 1) * page_tokens // block_tokens)
    return hashes[first:end]


def _block_in(groups: BlockGroups, group: int, hashes: Sequence[BlockHash], page: int) -> Sequence[BlockHash]:
    return groups.keys(group, hashes, page, page + 1)


class ServerEvents:
    """The events of an engine. The scheduler's thread calls `note` and `take`: both are short.

    vLLM hashes `hash_tokens` at a time, and a page of each group has a multiple of them. Our blocks have
    `block_tokens`.
    """

    def __init__(
        self, client: CacheClient, groups: Sequence[PageGroup], *, hash_tokens: int, block_tokens: int
    ) -> None:
        self._client = client
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._block_tokens = block_tokens
        self._always = {"locality": "LOCAL" if client.is_local else "REMOTE", "ownership": OWNER}
        self._record: LevelRecord[_Entry] = LevelRecord(self._look, max_blocks=_MAX_BLOCKS)
        self._ready: deque[KVCacheEvent] = deque()
        self._log = LogLimit(logger)
        self._notes: queue.SimpleQueue[_Note | _StartOver | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-vllm-events", daemon=True)
        self._thread.start()

    # --- the scheduler's thread ------------------------------------------------------------------------------------

    def note(
        self, request: Request, pages: Sequence[bytes], hashes: Sequence[BlockHash], first_block: int, end_block: int
    ) -> None:
        """Blocks `first_block..end_block` of a prompt were saved or matched. `hashes` may grow, `pages` may not."""
        first_token = first_block * self._block_tokens
        end_token = min(end_block * self._block_tokens, len(pages) * self._hash_tokens)
        if first_token >= end_token:
            return
        if self._notes.qsize() >= _MAX_NOTES:
            self._log.warning("notes", "KV events are missing: the cache server's answers are too slow for this engine")
            return
        self._notes.put(_Note(request, pages, hashes, first_token, end_token))

    def take(self) -> list[KVCacheEvent]:
        """The oldest waiting events, in order, up to a limit."""
        ready = self._ready
        return [ready.popleft() for _ in range(min(len(ready), _TAKEN_AT_ONCE))]

    def start_over(self) -> None:
        """Routers have discarded everything: publish it again."""
        self._ready.clear()
        self._notes.put(_StartOver())

    def close(self) -> None:
        self._notes.put(None)
        self._thread.join()

    # --- its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_at = 0.0
        while True:
            pause_s = max(0.0, next_at - time.monotonic()) if self._record.num_pages else None
            try:
                note = self._notes.get(timeout=pause_s)
            except queue.Empty:
                pass
            else:
                if note is None:
                    return
                if isinstance(note, _StartOver):
                    self._record.start_over()
                else:
                    self._add(note)
            now = time.monotonic()
            if now >= next_at and len(self._ready) < _MAX_WAITING:
                self._tell(self._asked())
            if now >= next_at:
                next_at = time.monotonic() + (_NEW_S if self._record.num_unseen else _KNOWN_S)
            elif self._record.num_unseen:
                next_at = min(next_at, now + _NEW_S)

    def _look(self, hashes: Sequence[BlockHash]) -> list[int]:
        return self._client.look(hashes)

    def _asked(self) -> list[LevelChange[_Entry]]:
        try:
            return self._record.ask(_ASKED_AT_ONCE)
        except KvtierError as error:
            self._log.warning("levels", "KV events are late: %s", str(error))
        except Exception:
            logger.exception("KV events are late")
        return []

    def _add(self, note: _Note) -> None:
        for number, group in enumerate(self._groups):
            pages = note.pages
            if group.page_tokens != self._hash_tokens:
                pages = BlockHashListWithBlockSize(list(pages), self._hash_tokens, group.page_tokens)
            for page in range(note.first_token // group.page_tokens, note.end_token // group.page_tokens):
                if page % _ADDED_AT_ONCE == _ADDED_AT_ONCE - 1:
                    time.sleep(_PAUSE_S)
                key = pages[page] + number.to_bytes(4, "big")
                if key not in self._record:
                    entry = self._entry_of(note.request, group, pages, page)
                    self._tell(self._record.add(key, group.blocks_of(note.hashes, page), entry))

    def _entry_of(self, request: Request, group: PageGroup, pages: Sequence[bytes], page: int) -> _Entry:
        first, end = page * group.page_tokens, (page + 1) * group.page_tokens
        extra_keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
        lora = request.lora_request
        return _Entry(
            group=group,
            page=pages[page],
            parent=pages[page - 1] if page else None,
            tokens=list(request.all_token_ids[first:end]),
            extra_keys=extra_keys,
            lora=None if lora is None else (lora.adapter_id, lora.name),
        )

    # --- events ----------------------------------------------------------------------------------------------------

    def _tell(self, changes: Sequence[LevelChange[_Entry]]) -> None:
        """Queue events for changes, gains first, so that a page that moves is always somewhere."""
        for level, medium in MEDIA.items():
            for run in _runs([change.entry for change in changes if change.gained & level]):
                self._ready.append(self._stored(run, medium))
        for level, medium in MEDIA.items():
            for run in _runs([change.entry for change in changes if change.lost & level]):
                hashes = [maybe_convert_block_hash(entry.page) for entry in run]
                described = {**self._always, **run[0].group.described}
                self._ready.append(
                    made_with_known(BlockRemoved, {**described, "block_hashes": hashes, "medium": medium})
                )

    def _stored(self, run: Sequence[_Entry], medium: str) -> KVCacheEvent:
        parent, lora = run[0].parent, run[0].lora
        return made_with_known(
            BlockStored,
            {
                **self._always,
                **run[0].group.described,
                "block_hashes": [maybe_convert_block_hash(entry.page) for entry in run],
                "parent_block_hash": None if parent is None else maybe_convert_block_hash(parent),
                "token_ids": [token for entry in run for token in entry.tokens],
                "lora_id": None if lora is None else lora[0],
                "lora_name": None if lora is None else lora[1],
                "medium": medium,
                "extra_keys": event_extra_keys([entry.extra_keys for entry in run]),
            },
        )


def _runs(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Consecutive pages of one prompt and group, reported by one event."""
    run: list[_Entry] = []
    for entry in entries:
        is_next = run and entry.group is run[-1].group and entry.parent == run[-1].page
        if run and (not is_next or len(run) == _EVENT_PAGES):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
