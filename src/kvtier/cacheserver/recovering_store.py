"""A folder's store that may fail: the server goes on with memory only, and reopens the store once it can."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtier.blocks.eviction import Eviction
from kvtier.blocks.share import Share
from kvtier.cacheserver.later_drops import LaterDrops
from kvtier.cacheserver.namespaces import Hashes, MemorySpace
from kvtier.errors import KvtierError, TierRefused, TierUnavailable
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.disk import DiskStore
from kvtier.stores.files import Files
from kvtier.stores.stored_block import StoreSpace

logger = logging.getLogger(__name__)


class RecoveringStore:
    """`current` is the store, or None while it is down. `condition` guards it and the state shared by disk threads."""

    def __init__(
        self,
        folder: Path,
        file_space: int,
        files: Files | None,
        share_of: Callable[[str], Share] | None = None,
        eviction: Eviction = "lru",
    ) -> None:
        self.folder = folder
        self.failures: Counter[str] = Counter()
        self.condition = threading.Condition()
        self.log = LogLimit(logger)
        self.current: DiskStore | None = None
        self.num_using = 0
        self.num_outages = 0
        self.is_closing = False
        self._file_space = file_space
        self._files = files
        self._share_of = share_of
        self._eviction = eviction
        self._failed: DiskStore | None = None
        self._losses_before: Counter[str] = Counter()
        self._drops = LaterDrops()

    def open(self) -> None:
        """Raises `ConfigError` if the folder cannot be used, and `OSError` if the device fails."""
        self.current = self._opened()

    def space_of(self, store: DiskStore, space: MemorySpace) -> StoreSpace | None:
        """The namespace on disk; None if its block size differs there, or only readers have opened it."""
        if space.is_awaited:
            return None
        try:
            return store.open(space.namespace, space.stored_name, space.block_bytes, space.block_tokens)
        except TierRefused as error:
            self.log.warning("size", "disk store %s: %s; this namespace stays in memory", self.folder, error)
            return None

    def find(self, space: MemorySpace) -> tuple[DiskStore, StoreSpace] | None:
        """The store and the namespace in it, or None if either is missing."""
        store = self.current
        stored_space = None if store is None else self.space_of(store, space)
        return None if store is None or stored_space is None else (store, stored_space)

    @contextlib.contextmanager
    def using(self) -> Iterator[DiskStore | None]:
        """The store, kept open meanwhile; None while it is down. A failure of the store raises `TierUnavailable`."""
        with self.condition:
            store = self.current
            self.num_using += 1
        try:
            yield store
        except KvtierError:
            raise
        except Exception as error:
            if store is None:
                raise
            self.fail(store, error)
            raise TierUnavailable(f"the disk failed: {_sentence_of(error)}") from error
        finally:
            with self.condition:
                self.num_using -= 1

    def drop(self, space: MemorySpace, hashes: Hashes | None) -> int:
        """Drop `hashes`, or the whole namespace if None. While the store is down, the drop waits until it is back."""
        with contextlib.suppress(TierUnavailable), self.using() as store:
            try:
                if store is not None:
                    stored_space = self.space_of(store, space)
                    return 0 if stored_space is None else store.drop(stored_space, hashes)
            except Exception:
                self._drop_later(space, hashes)
                raise
            self._drop_later(space, hashes)
        return 0

    def _drop_later(self, space: MemorySpace, hashes: Hashes | None) -> None:
        with self.condition:
            self._drops.add(space, hashes)

    def fail(self, store: DiskStore, error: Exception) -> None:
        """Go on without the store after an error of the disk or a bug of ours; the keeper tries to reopen it."""
        with self.condition:
            self.failures["device" if isinstance(error, OSError) else "internal error"] += 1
            if self.current is not store:
                return
            self.current, self._failed = None, store
            self.num_outages += 1
            self._losses_before += store.losses
            logger.warning(
                "disk store %s failed: %s; going on with memory only, and retrying", self.folder, _sentence_of(error)
            )
            if not isinstance(error, OSError):
                # As text: a log handler that kept the traceback object would keep the arena mapped.
                logger.error("%s", "".join(traceback.format_exception(error)).rstrip())
            self.condition.notify_all()

    def fail_now(self, error: Exception) -> None:
        """Fail the current store after an unexpected error in a disk thread, whose task was not carried out."""
        store = self.current
        if store is not None:
            self.fail(store, error)
        else:
            self.log.warning("thread", "disk store %s: %s", self.folder, _sentence_of(error))

    def reopen(self, queue_unstored: Callable[[], None]) -> bool:
        """Reopen the store after a failure; False if that is not possible yet.

        `queue_unstored` queues all blocks that should be on disk, before the store counts as up: flushes wait for them.
        """
        with self.condition:
            if self.num_using:
                return False  # its descriptors must not be closed while a thread uses them
            failed, self._failed = self._failed, None
        try:
            if failed is not None:
                failed.close()
            store = self._opened()
            self._drop_outstanding(store)
        except Exception as error:
            self.log.warning("down", "disk store is still down: %s", _sentence_of(error))
            return False
        queue_unstored()
        with self.condition:
            self.current = store
            self.condition.notify_all()
        logger.info("disk store %s is up again", self.folder)
        return True

    def losses(self) -> dict[str, int]:
        """Blocks lost and failures, by kind."""
        store = self.current
        return dict(+(self._losses_before + self.failures + (store.losses if store is not None else Counter())))

    def close(self) -> None:
        for store in filter(None, (self.current, self._failed)):
            store.close()

    def _opened(self) -> DiskStore:
        """Open the store, and log how many blocks were recovered."""
        store = DiskStore(
            self.folder, self._file_space, files=self._files, share_of=self._share_of, eviction=self._eviction
        )
        known = store.spaces()
        shown: Sequence[StoreSpace | None] = [space for space in known if len(space.index)] or known[:1] or [None]
        for space in shown:
            logger.info("recover %d blocks. info: %s", 0 if space is None else len(space.index), store.info(space))
        if store.losses:
            losses = ", ".join(f"{count} ({kind})" for kind, count in store.losses.items())
            logger.warning("disk store %s lost: %s", self.folder, losses)
        return store

    def _drop_outstanding(self, store: DiskStore) -> None:
        """Carry out the drops of the outage before any block is visible; if that fails, close the store and raise."""
        with self.condition:
            drops = self._drops.take()
        try:
            for space, hashes in drops:
                stored_space = self.space_of(store, space)
                if stored_space is not None:
                    store.drop(stored_space, hashes)
        except Exception:
            with self.condition:
                for space, hashes in drops:
                    self._drops.add(space, hashes)
            store.close()
            raise


def _sentence_of(error: Exception) -> str:
    """The message of a device's or kvtier's error; for any other error, a bug of ours, its type as well."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, KvtierError) else f"{type(error).__name__}: {error}"
