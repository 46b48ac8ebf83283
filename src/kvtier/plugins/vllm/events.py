"""KV events for routers, in vLLM's own format: where the cache server has blocks of this engine's prompts.

The scheduler's thread notes pages that are saved or matched. Another thread asks the server where they are, for as long
as they are tracked (`transfer/level_record`), and makes events of the changes; the scheduler's thread passes them to
vLLM with its next step. Routers know vLLM's own media and drop events of others, so memory is `CPU` and
disk `STORAGE`; `ownership` is `kvtier`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.errors import KvtierError
from kvtier.observe.log_limit import LogLimit
from kvtier.plugins.vllm.compat import event_extra_keys, kind_of, made_with_known
from kvtier.plugins.vllm.identity import BLOCK_TOKENS, Identity
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
class _Note:
    """Pages of a prompt that may be in the server, and the hashes of all its pages and blocks."""

    request: Request
    pages: Sequence[bytes]
    hashes: Sequence[BlockHash]
    first_page: int
    end_page: int


class _StartOver:
    """Routers have discarded all earlier events."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The fields of an event about a page."""

    page: bytes
    parent: bytes | None
    tokens: list[int]
    extra_keys: tuple[Any, ...] | None
    lora: tuple[int, str] | None


def server_events(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, client: CacheClient, identity: Identity
) -> ServerEvents | None:
    """The events of an engine with one group of full attention. None if vLLM publishes no events."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    kind = kind_of(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    return ServerEvents(client, identity.page_tokens, kind, block_tokens=identity.layout.block_tokens)


class ServerEvents:
    """The events of an engine with one group. The scheduler's thread calls `note` and `take`: both are short."""

    def __init__(
        self, client: CacheClient, page_tokens: int, kind: str | None, *, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self._client = client
        self._block_tokens = block_tokens
        self._page_tokens = page_tokens
        self._always = {
            "block_size": page_tokens,
            "group_idx": 0,
            "kv_cache_spec_kind": kind,
            "locality": "LOCAL" if client.is_local else "REMOTE",
            "ownership": OWNER,
        }
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
        first_page = first_block * self._block_tokens // self._page_tokens
        end_page = min(end_block * self._block_tokens // self._page_tokens, len(pages))
        if first_page >= end_page:
            return
        if self._notes.qsize() >= _MAX_NOTES:
            self._log.warning("notes", "KV events are missing: the cache server's answers are too slow for this engine")
            return
        self._notes.put(_Note(request, pages, hashes, first_page, end_page))

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
        for page in range(note.first_page, note.end_page):
            if page % _ADDED_AT_ONCE == _ADDED_AT_ONCE - 1:
                time.sleep(_PAUSE_S)
            key = note.pages[page]
            if key not in self._record:
                self._tell(self._record.add(key, self._blocks_of(note, page), self._entry_of(note, page)))

    def _blocks_of(self, note: _Note, page: int) -> Sequence[BlockHash]:
        first = page * self._page_tokens // self._block_tokens
        end = -(-(page + 1) * self._page_tokens // self._block_tokens)
        return note.hashes[first:end]

    def _entry_of(self, note: _Note, page: int) -> _Entry:
        request = note.request
        first, end = page * self._page_tokens, (page + 1) * self._page_tokens
        extra_keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
        lora = request.lora_request
        return _Entry(
            page=note.pages[page],
            parent=note.pages[page - 1] if page else None,
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
                self._ready.append(
                    made_with_known(BlockRemoved, {**self._always, "block_hashes": hashes, "medium": medium})
                )

    def _stored(self, run: Sequence[_Entry], medium: str) -> KVCacheEvent:
        parent, lora = run[0].parent, run[0].lora
        return made_with_known(
            BlockStored,
            {
                **self._always,
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
    """Consecutive pages of one prompt, reported by one event."""
    run: list[_Entry] = []
    for entry in entries:
        if run and (entry.parent != run[-1].page or len(run) == _EVENT_PAGES):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
