"""A worker's side: blocks between vLLM's pages and the cache server. vLLM's worker calls; threads copy.

Pages that are being saved are not freed: the scheduler waits until the worker says that a finished request is saved.
When a request is preempted its pages go at once: what is being copied is waited for, what has not begun is dropped.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import SingleClient
from kvtier.errors import CapacityError, TierError, TierUnavailable
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit
from kvtier.plugins.vllm.identity import BLOCK_TOKENS, Identity
from kvtier.plugins.vllm.plan import PIECE_BYTES, Load, Loaded, Save, StepPlan, WorkerNews
from kvtier.plugins.vllm.statistics import CacheStats
from kvtier.transfer.copier import Copier, Mark
from kvtier.transfer.copiers.own_threads import own_threads
from kvtier.transfer.copiers.page_copier import page_copier
from kvtier.transfer.places import places_of

logger = logging.getLogger(__name__)

_NUM_LOADERS = 2
_UNIT_BYTES = 16 << 20
"""Blocks that come from disk are copied as soon as so many are there."""


@dataclass(eq=False, slots=True)
class _Piece:
    """Blocks of one request to be saved together, once the device is past `after`."""

    save: Save
    after: Mark
    is_copying: bool = False
    is_dropped: bool = False


class WorkerSide:
    """Of one rank of an engine."""

    def __init__(self, client: SingleClient, identity: Identity, rank: int) -> None:
        self._client = client
        self._identity = identity
        self._rank = rank
        self._copier: Copier | None = None
        self._piece_blocks = max(1, PIECE_BYTES // identity.layout.slot_bytes)
        self._unit_blocks = max(1, _UNIT_BYTES // identity.layout.slot_bytes)
        self._condition = threading.Condition()
        self._pieces: dict[str, set[_Piece]] = {}
        self._ended: set[str] = set()
        self._received: set[str] = set()
        self._bad_pages: set[int] = set()
        self._news = WorkerNews()
        self._stats = CacheStats()
        self._step = 0
        self._log = LogLimit(logger)
        self._bounces = _Bounces(self._piece_blocks * identity.layout.slot_bytes)
        self._loaders = own_threads(_NUM_LOADERS, "kvtier-vllm-load")
        self._to_save: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._saver = own_threads(1, "kvtier-vllm-save")
        self._saver.submit(self._run_saver)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises `ConfigError` when the tensors are not what the engine said they would be."""
        tensors = [kv_caches[name] for name in self._identity.layer_names]
        first_head = self._identity.first_head(self._rank)
        self._copier = page_copier(tensors, self._identity.layout, first_head=first_head)
        assert self._identity.num_ranks > 1 or self._copier.is_whole, "a block must not be shown without its heads"
        if self._client.is_local:
            with contextlib.suppress(TierUnavailable):  # it is not there yet
                self._copier.adopt(self._client.arena)

    def start(self, plan: StepPlan) -> None:
        """Begin this step's loads."""
        self._step = plan.number
        with self._condition:
            self._ended |= plan.ended
        if plan.loads:
            assert self._copier is not None
            mark = self._copier.mark()
            for load in plan.loads:
                self._loaders.submit(self._guarded_load, load, mark)

    def save(self, plan: StepPlan) -> None:
        """Begin this step's saves; the forward pass is with the device."""
        if not plan.saves:
            return
        assert self._copier is not None
        mark = self._copier.mark()
        pieces = [_Piece(part, mark) for save in plan.saves for part in save.parts(self._piece_blocks)]
        with self._condition:
            for piece in pieces:
                self._pieces.setdefault(piece.save.request_id, set()).add(piece)
        for piece in pieces:
            self._to_save.put(piece)

    def drop_saves(self, preempted: set[str]) -> None:
        """Return when nothing of these requests is being copied, or will be."""
        with self._condition:
            for request_id in preempted:
                for piece in self._pieces.get(request_id, ()):
                    piece.is_dropped = not piece.is_copying
            self._condition.wait_for(
                lambda: (
                    not any(piece.is_copying for request_id in preempted for piece in self._pieces.get(request_id, ()))
                )
            )

    def results(self) -> KVConnectorTransferResults:
        """What is over since the last call."""
        with self._condition:
            sent = {request_id for request_id in self._ended if request_id not in self._pieces}
            self._ended -= sent
            received, self._received = self._received, set()
        return KVConnectorTransferResults(sent, received, set())

    def take_bad_pages(self) -> set[int]:
        with self._condition:
            bad, self._bad_pages = self._bad_pages, set()
        return bad

    def take_news(self) -> WorkerNews:
        with self._condition:
            news, self._news = self._news, WorkerNews()
        news.step = self._step
        return news

    def take_stats(self) -> CacheStats:
        with self._condition:
            stats, self._stats = self._stats, CacheStats()
        return stats

    def close(self) -> None:
        """What was to be saved is saved first."""
        self._loaders.shutdown()
        self._to_save.put(None)
        self._saver.shutdown()
        if self._copier is not None:
            self._copier.close()
        self._bounces.close()
        self._client.close()

    # --- loading ------------------------------------------------------------------------------------------------------

    def _guarded_load(self, load: Load, after: Mark) -> None:
        num_loaded = 0
        loaded: list[Loaded] = []
        try:
            for part in self._load(load, after):
                loaded.append(part)
                num_loaded += part.nbytes // self._identity.layout.block_bytes
        except TierError as error:
            self._log.warning("load", "a load failed and is computed instead: %s", error)
        except Exception:
            logger.exception("a load failed and is computed instead")
        with self._condition:
            self._received.add(load.request_id)
            self._news.loaded += _by_tier(loaded)
            self._count_loaded(loaded)
            if num_loaded < len(load.hashes):
                self._stats.failed_loads += not self._rank
                self._news.failed_loads.add(load.request_id)
                first_bad = (load.first_block + num_loaded) * BLOCK_TOKENS // self._identity.page_tokens
                self._bad_pages.update(load.pages[first_bad:])

    def _load(self, load: Load, after: Mark) -> Iterator[Loaded]:
        """Bring the blocks from the first on, by parts, until they are all there, or one is missing, or time is up."""
        hashes = [BlockHash(one) for one in load.hashes]
        deadline = time.monotonic() + load.timeout_s
        if self._client.is_local:
            return self._load_here(load, hashes, after, deadline)
        return self._load_over_tcp(load, hashes, after, deadline)

    def _load_here(self, load: Load, hashes: Sequence[BlockHash], after: Mark, deadline: float) -> Iterator[Loaded]:
        """Straight out of the server's memory, into which it reads what is on disk."""
        started_at = time.monotonic()
        with self._client.match(hashes, timeout_s=load.timeout_s) as lease:
            if lease.arena is None:
                return
            position, in_memory = 0, lease.num_ready_at_match
            while position < lease.num_blocks and time.monotonic() < deadline:
                is_in_memory = position < in_memory
                end = lease.wait(in_memory if is_in_memory else position + self._unit_blocks)
                if end <= position:
                    return
                self._into_pages(load, position, end, lease.arena, lease.offsets[position:end], after)
                now = time.monotonic()
                yield self._part("server" if is_in_memory else "disk", end - position, now - started_at)
                position, started_at = end, now

    def _load_over_tcp(self, load: Load, hashes: Sequence[BlockHash], after: Mark, deadline: float) -> Iterator[Loaded]:
        block_bytes, slot_bytes = self._identity.layout.block_bytes, self._identity.layout.slot_bytes
        with self._bounces.lent() as arena:
            for position in range(0, len(hashes), self._piece_blocks):
                started_at = time.monotonic()
                if started_at >= deadline:
                    return
                wanted = hashes[position : position + self._piece_blocks]
                offsets = [slot_bytes * number for number in range(len(wanted))]
                views = [arena.view(offset, block_bytes) for offset in offsets]
                count = self._client.get(wanted, views, timeout_s=deadline - started_at)
                self._into_pages(load, position, position + count, arena, offsets[:count], after)
                if count:
                    yield self._part("tcp", count, time.monotonic() - started_at)
                if count < len(wanted):
                    return

    def _into_pages(
        self, load: Load, first: int, end: int, arena: MappedArena, offsets: Sequence[int], after: Mark
    ) -> None:
        assert self._copier is not None
        self._copier.adopt(arena)
        places = self._places(load.pages, range(load.first_block + first, load.first_block + end))
        with arena.in_use():
            self._copier.load(arena, offsets, places, after).wait()

    def _places(self, pages: Sequence[int], blocks: Sequence[int]) -> list[int]:
        page_tokens, block_tokens = self._identity.page_tokens, self._identity.layout.block_tokens
        return places_of(pages, blocks, page_tokens=page_tokens, block_tokens=block_tokens)

    def _part(self, tier: str, num_blocks: int, seconds: float) -> Loaded:
        return Loaded(tier, num_blocks * self._identity.layout.block_bytes, seconds)

    def _count_loaded(self, loaded: Sequence[Loaded]) -> None:
        stats = self._stats
        for part in loaded:
            num_tokens = part.nbytes // self._identity.layout.block_bytes * BLOCK_TOKENS
            stats.loaded_bytes += part.nbytes
            stats.load_seconds += part.seconds
            if self._rank:
                continue  # the first rank counts the tokens
            if part.tier == "server":
                stats.loaded_tokens_memory += num_tokens
            elif part.tier == "disk":
                stats.loaded_tokens_disk += num_tokens
            else:
                stats.loaded_tokens_tcp += num_tokens

    # --- saving -------------------------------------------------------------------------------------------------------

    def _run_saver(self) -> None:
        while (piece := self._to_save.get()) is not None:
            batch = [piece]
            num_blocks = len(piece.save.hashes)
            with contextlib.suppress(queue.Empty):
                while num_blocks < self._piece_blocks:
                    more = self._to_save.get_nowait()
                    if more is None:
                        self._to_save.put(None)
                        break
                    batch.append(more)
                    num_blocks += len(more.save.hashes)
            self._guarded_save(batch)

    def _guarded_save(self, batch: Sequence[_Piece]) -> None:
        own = [piece for piece in batch if piece.save.slots is None]
        together = [own] if own and self._client.is_local else [[piece] for piece in own]
        for pieces in [*together, *([piece] for piece in batch if piece.save.slots is not None)]:
            try:
                self._save(pieces)
            except (TierError, CapacityError) as error:
                self._log.warning("save", "blocks are not kept: %s", error)
                with self._condition:
                    self._stats.refused_blocks += sum(len(piece.save.hashes) for piece in pieces)
            except Exception:
                logger.exception("blocks are not kept")
            finally:
                with self._condition:
                    for piece in pieces:
                        self._end_piece(piece)

    def _save(self, pieces: Sequence[_Piece]) -> None:
        if pieces[0].save.slots is not None:
            self._save_share(pieces[0])
        elif self._client.is_local:
            self._save_here(pieces)
        else:
            self._save_over_tcp(pieces[0])

    def _save_here(self, batch: Sequence[_Piece]) -> None:
        """All of them in one reservation, straight into the server's memory."""
        reservation = self._client.reserve([BlockHash(one) for piece in batch for one in piece.save.hashes])
        try:
            arena = reservation.arena
            assert arena is not None
            first_slot, first_position = 0, 0
            for piece in batch:
                end_position = first_position + len(piece.save.hashes)
                end_slot = bisect.bisect_left(reservation.positions, end_position)
                numbers = [position - first_position for position in reservation.positions[first_slot:end_slot]]
                if numbers and self._out_of_pages(piece, numbers, arena, reservation.offsets[first_slot:end_slot]):
                    reservation.commit(first_slot, len(numbers))
                    with self._condition:
                        self._stats.stored_blocks += len(numbers)
                first_slot, first_position = end_slot, end_position
            with self._condition:
                self._stats.refused_blocks += reservation.num_refused
        finally:
            reservation.close()

    def _save_share(self, piece: _Piece) -> None:
        """This rank's heads, into slots that the scheduler has reserved."""
        slots = piece.save.slots
        assert slots is not None
        is_written = False
        try:
            arena = self._arena_with(slots.arena_inode)
            os.kill(slots.holder_pid, 0)  # raises if it is gone; for some moments after that its slots stay as they are
            is_written = self._out_of_pages(piece, slots.positions, arena, slots.offsets)
        finally:
            with self._condition:
                self._news.written[slots.job] += 1
                if not is_written:
                    self._news.unwritten.add(slots.job)
                elif not self._rank:
                    self._stats.stored_blocks += len(slots.offsets)

    def _arena_with(self, inode: int) -> MappedArena:
        """The memory in which the scheduler has reserved. Raises `TierUnavailable` when it is not the server's now."""
        with contextlib.suppress(TierUnavailable):
            if self._client.arena.inode == inode:
                return self._client.arena
        self._client.ping()
        if self._client.arena.inode != inode:
            raise TierUnavailable("the cache server was replaced by another one")
        return self._client.arena

    def _save_over_tcp(self, piece: _Piece) -> None:
        block_bytes, slot_bytes = self._identity.layout.block_bytes, self._identity.layout.slot_bytes
        hashes = [BlockHash(one) for one in piece.save.hashes]
        offsets = [slot_bytes * number for number in range(len(hashes))]
        with self._bounces.lent() as arena:
            if self._out_of_pages(piece, range(len(hashes)), arena, offsets):
                num_stored = self._client.set(hashes, [arena.view(offset, block_bytes) for offset in offsets])
                with self._condition:
                    self._stats.stored_blocks += num_stored

    def _out_of_pages(self, piece: _Piece, numbers: Sequence[int], arena: MappedArena, offsets: Sequence[int]) -> bool:
        """Copy the blocks of a piece with these numbers. False when it was dropped: its pages are another's."""
        assert self._copier is not None
        with self._condition:
            if piece.is_dropped:
                return False
            piece.is_copying = True
        try:
            self._copier.adopt(arena)
            places = self._places(piece.save.pages, [piece.save.first_block + number for number in numbers])
            with arena.in_use():
                self._copier.store(places, arena, offsets, piece.after).wait()
        finally:
            with self._condition:
                piece.is_copying = False
                self._condition.notify_all()
        return True

    def _end_piece(self, piece: _Piece) -> None:
        pieces = self._pieces[piece.save.request_id]
        pieces.discard(piece)
        if not pieces:
            del self._pieces[piece.save.request_id]


class _Bounces:
    """Memory of this process that blocks go through on their way over TCP. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._idle: list[MappedArena] = []

    @contextlib.contextmanager
    def lent(self) -> Iterator[MappedArena]:
        with self._lock:
            arena = self._idle.pop() if self._idle else MappedArena.create(self._nbytes)
        try:
            yield arena
        finally:
            with self._lock:
                self._idle.append(arena)

    def close(self) -> None:
        for arena in self._idle:
            arena.close()


def _by_tier(parts: Sequence[Loaded]) -> list[Loaded]:
    """One for each tier."""
    totals: dict[str, Loaded] = {}
    for part in parts:
        before = totals.get(part.tier, Loaded(part.tier, 0, 0.0))
        totals[part.tier] = Loaded(part.tier, before.nbytes + part.nbytes, before.seconds + part.seconds)
    return list(totals.values())
