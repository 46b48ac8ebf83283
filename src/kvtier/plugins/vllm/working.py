"""A worker's side: blocks between vLLM's pages and the cache server. vLLM's worker calls; threads copy.

Pages that are being saved are not freed: the scheduler waits until the worker says that a finished request is saved,
and a preempted request's saves are waited for before its pages are given away.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import SingleClient
from kvtier.errors import CapacityError, TierError
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import BlockLease
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit
from kvtier.plugins.paged_kv import PagedKv, PageOrder
from kvtier.plugins.vllm.identity import BLOCK_TOKENS, Identity
from kvtier.plugins.vllm.plan import Move, StepPlan

logger = logging.getLogger(__name__)

_NUM_LOADERS = 2
_PREEMPTION_TIMEOUT_S = 30.0


class WorkerSide:
    """Of an engine with one rank."""

    def __init__(self, client: SingleClient, identity: Identity) -> None:
        self._client = client
        self._identity = identity
        self._paged: PagedKv | None = None
        self._condition = threading.Condition()
        self._saving: Counter[str] = Counter()
        self._saved_once: set[str] = set()
        self._finishing: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_pages: set[int] = set()
        self._log = LogLimit(logger)
        self._loaders = ThreadPoolExecutor(_NUM_LOADERS, "kvtier-vllm-load")
        self._saver = ThreadPoolExecutor(1, "kvtier-vllm-save")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises `ConfigError` when the tensors are not what the engine said they would be."""
        identity = self._identity
        tensors = [kv_caches[name] for name in identity.layer_names]
        order = PageOrder.TRANSPOSED_K if tensors[0].device.type == "cpu" else PageOrder.ROWS
        self._paged = PagedKv(tensors, identity.layout, order)
        assert self._paged.is_whole, "a block must not be shown without some of its heads"

    def start(self, plan: StepPlan) -> None:
        """Begin this step's loads."""
        for move in plan.loads:
            self._loaders.submit(self._guarded_load, move)

    def save(self, plan: StepPlan) -> None:
        """Begin this step's saves; the forward pass is with the device."""
        if not plan.saves:
            return
        assert self._paged is not None
        computed = _event()
        with self._condition:
            for move in plan.saves:
                self._saving[move.request_id] += 1
                self._saved_once.add(move.request_id)
        for move in plan.saves:
            self._saver.submit(self._guarded_save, move, computed)

    def wait_for(self, preempted: set[str]) -> None:
        """Until nothing of these requests is being saved."""
        if not preempted:
            return
        with self._condition:
            self._condition.wait_for(
                lambda: not any(self._saving[request_id] for request_id in preempted), _PREEMPTION_TIMEOUT_S
            )

    def results(self, finished: set[str]) -> KVConnectorTransferResults:
        """What is over since the last call. `finished` requests are reported once they are saved."""
        with self._condition:
            self._finishing |= finished & self._saved_once
            sent = {request_id for request_id in self._finishing if not self._saving[request_id]}
            self._finishing -= sent
            self._saved_once -= sent
            for request_id in sent:
                del self._saving[request_id]
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(sent, received, failed)

    def take_bad_pages(self) -> set[int]:
        with self._condition:
            bad, self._bad_pages = self._bad_pages, set()
        return bad

    def close(self) -> None:
        self._loaders.shutdown()
        self._saver.shutdown()
        self._client.close()

    # --- threads ------------------------------------------------------------------------------------------------------

    def _guarded_load(self, move: Move) -> None:
        num_loaded = 0
        try:
            num_loaded = self._load(move)
        except TierError as error:
            self._log.warning("load", "a load failed and is computed instead: %s", error)
        except Exception:
            logger.exception("a load failed and is computed instead")
        with self._condition:
            self._received.add(move.request_id)
            if num_loaded < len(move.hashes):
                self._failed.add(move.request_id)
                first_bad = (move.first_token + num_loaded * BLOCK_TOKENS) // self._page_tokens
                end = -(-(move.first_token + len(move.hashes) * BLOCK_TOKENS) // self._page_tokens)
                self._bad_pages.update(move.pages[first_bad:end])

    def _load(self, move: Move) -> int:
        """How many blocks are in the pages."""
        assert self._paged is not None
        with self._client.match([BlockHash(one) for one in move.hashes]) as lease:
            count = lease.wait(len(move.hashes))
            if isinstance(lease, BlockLease) and lease.arena is not None:
                with _blocks_in(lease.arena, lease.offsets[:count], self._identity.layout.block_bytes) as blocks:
                    self._paged.write(move.pages, move.first_token, blocks)
                return count
            blocks = [bytearray(self._identity.layout.block_bytes) for _ in range(lease.num_blocks)]
            count = lease.fetch(blocks)
            self._paged.write(move.pages, move.first_token, blocks[:count])
            return count

    def _guarded_save(self, move: Move, computed: torch.cuda.Event | None) -> None:
        try:
            if computed is not None:
                computed.synchronize()
            self._save(move)
        except (TierError, CapacityError) as error:
            self._log.warning("save", "blocks are not kept: %s", error)
        except Exception:
            logger.exception("blocks are not kept")
        finally:
            with self._condition:
                self._saving[move.request_id] -= 1
                self._condition.notify_all()

    def _save(self, move: Move) -> None:
        assert self._paged is not None
        hashes = [BlockHash(one) for one in move.hashes]
        layout = self._identity.layout
        if not self._client.is_local:
            blocks = [bytearray(layout.block_bytes) for _ in hashes]
            self._paged.read(move.pages, move.first_token, blocks)
            self._client.set(hashes, blocks)
            return
        reservation = self._client.reserve(hashes)
        try:
            arena = reservation.arena
            assert arena is not None
            with _blocks_in(arena, reservation.offsets, layout.block_bytes) as slots:
                for position, slot in zip(reservation.positions, slots, strict=True):
                    self._paged.read(move.pages, move.first_token + position * BLOCK_TOKENS, [slot])
            if reservation.num_blocks:  # else all of them are there already
                reservation.commit()
        finally:
            reservation.close()

    @property
    def _page_tokens(self) -> int:
        return self._identity.page_tokens


@contextlib.contextmanager
def _blocks_in(arena: MappedArena, offsets: Sequence[int], block_bytes: int) -> Iterator[list[Buffer]]:
    """The blocks at `offsets` of memory that stays mapped meanwhile; leased or reserved, so nobody else writes them."""
    kind = ctypes.c_ubyte * block_bytes
    with arena.in_use():
        yield [memoryview(kind.from_address(arena.address + offset)).cast("B") for offset in offsets]


def _event() -> torch.cuda.Event | None:
    """Where the device is now, if it is a GPU."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
