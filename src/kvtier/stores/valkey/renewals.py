"""Blocks that are used from a host's own memory live on in the cluster, too: a thread renews them there. Thread-safe.

Best effort: what is too much at once is renewed with its next use.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import KvtierError
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.valkey.blocks import ClusterBlocks

logger = logging.getLogger(__name__)

_CALL_S = 1.0
_MAX_QUEUED = 1 << 17
_RENEWED_AT_ONCE = 4096


class Renewals:
    """The renewals of one process. Its thread starts with the first renewal, and ends with `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[ClusterBlocks, Sequence[BlockHash]] | None] = SimpleQueue()
        self._num_queued = 0
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._log = LogLimit(logger)

    def ask(self, blocks: ClusterBlocks, hashes: Sequence[BlockHash], wanted: Sequence[BlockHash]) -> None:
        """`hashes` are used now, and of those the cluster will be asked for `wanted`. Never waits."""
        asked = set(wanted)
        self.queue(blocks, [block_hash for block_hash in blocks.places.ask(hashes) if block_hash not in asked])

    def queue(self, blocks: ClusterBlocks, hashes: Sequence[BlockHash]) -> None:
        """These live on from when they were last asked for. Never waits."""
        with self._lock:
            if not hashes or self._is_closing or self._num_queued + len(hashes) > _MAX_QUEUED:
                return
            self._num_queued += len(hashes)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvtier-cluster-renewals", daemon=True)
                self._thread.start()
            self._queue.put((blocks, hashes))

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            thread = self._thread
        self._queue.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            blocks, hashes = task
            try:
                for first in range(0, len(hashes), _RENEWED_AT_ONCE):
                    if not self._is_closing:
                        blocks.renew(hashes[first : first + _RENEWED_AT_ONCE], _CALL_S)
            except KvtierError as error:
                self._log.warning("renewing", "cluster: %s", str(error))
            with self._lock:
                self._num_queued -= len(hashes)
