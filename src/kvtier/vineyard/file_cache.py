"""The file half of `KVCache`: chunks of tokens in a folder that any number of processes and hosts share.

Calls come from any thread. A background thread removes unused chunks. After construction, no error of the filesystem is
raised: chunks that cannot be read are misses, chunks that cannot be written do not count as stored. `close` waits for
calls in progress; later calls raise `TierUnavailable`. Ctrl-C ends a call after the chunks in flight, and leaves a
working cache.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from kvtier.errors import ConfigError, TierUnavailable
from kvtier.memory.scattered import Scattered
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.files import Files
from kvtier.vineyard.chunk_files import ChunkFiles, ChunkName, ChunkReader, ChunkWriter
from kvtier.vineyard.chunk_names import ChunkNames, NamedChunks, identity_of
from kvtier.vineyard.chunk_room import BEAT_S, BUCKET_S, ChunkRoom
from kvtier.vineyard.chunk_transfers import ChunkTransfers, Direction
from kvtier.vineyard.file_config import FileCacheConfig
from kvtier.vineyard.kv_tensor import TokenTensors, check_memory, check_tensors, held_addresses, target_addresses
from kvtier.vineyard.signal_free import IsWanted, SignalFreeThread

logger = logging.getLogger(__name__)

_Chunk = TypeVar("_Chunk", ChunkReader, ChunkWriter)
_Result = TypeVar("_Result")

_CLOSED = "this cache is closed"
_MAX_CHUNK_BYTES = 1 << 40
_MIN_BEAT_S = 0.01
_TOUCH_S = 5.0
_ALWAYS_LOOKED_CHUNKS = 128
"""Prefixes of up to this many chunks are checked completely by every update."""
_PASSING_ERRNOS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT)
)
"""Read errors that say nothing about the file."""
_LOOK_SHARE = 0.1
"""Share of the time that checking longer prefixes may take."""


class _Unwanted(Exception):
    pass


class FileCache:
    """Chunks of `config.chunk_size` tokens, `cache_capacity` tokens at most over all processes that use the folder.

    The limit counts chunks of the same file size, and applies unless another open cache has a larger one. Raises
    `ConfigError` if the folder cannot be written or the sizes are impossible.
    """

    def __init__(
        self,
        config: FileCacheConfig,
        *,
        tensor_bytes: int,
        cache_capacity: int,
        layer: int,
        files: Files | None = None,
    ) -> None:
        if cache_capacity < config.chunk_size:
            raise ConfigError(
                f"cache_capacity of {cache_capacity} tokens has no room for one chunk of {config.chunk_size}"
            )
        chunk_bytes = 2 * layer * tensor_bytes * config.chunk_size
        if chunk_bytes > _MAX_CHUNK_BYTES:
            raise ConfigError(
                f"a chunk of {config.chunk_size} tokens, {layer} layers and {tensor_bytes} bytes a tensor has "
                f"{chunk_bytes} bytes, more than {_MAX_CHUNK_BYTES}"
            )
        self._config = config
        self._tensor_bytes = tensor_bytes
        self._layer = layer
        self._chunk_tokens = config.chunk_size
        identity = identity_of(tensor_bytes, layer, config.chunk_size)
        self._names = ChunkNames(identity, config.chunk_size, config.split_number)
        self._store = ChunkFiles(Path(config.root).absolute(), chunk_bytes, files, is_shared=config.is_shared)
        bound_bytes = cache_capacity // config.chunk_size * self._store.file_bytes
        try:
            self._room = ChunkRoom(self._store, bound_bytes)
        except OSError as error:
            raise ConfigError(f"the chunk folder {config.root} cannot be used: {error.strerror}") from error
        self._transfers = ChunkTransfers(config.io_workers)
        self._apart = SignalFreeThread("kvtier-chunk-calls")
        self._touch_s = min(_TOUCH_S, config.ttl / 10, config.global_ttl / 10)
        self._log = LogLimit(logger)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # not the condition, which Ctrl-C could leave locked
        self._call_ended = threading.Condition(self._lock)
        self._callers: dict[object, int] = {}
        """The threads of calls in progress."""
        self._is_closed = False
        self._is_closed_within_a_call = False
        self._counts: Counter[str] = Counter()
        self._num_damaged = 0
        self._used_paths: set[str] = set()
        self._unusable: dict[str, tuple[int, int]] = {}
        """Files under a chunk's name that were not hits, with their identity, to notice when they are replaced."""
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kvtier-chunk-keeper", daemon=True)
        self._keeper.start()

    def update(self, prefix: Sequence[int] | None, tokens: Sequence[int], kv: Sequence[TokenTensors]) -> int:
        """Store the full chunks of `tokens`, which follow `prefix`; returns how many of these tokens are stored now.

        Chunks stored before count, unless this cache failed to read them: those are replaced. Nothing is stored behind
        an absent prefix. A short count means that there was no room, or that the filesystem failed. Raises
        `ConfigError`, before anything is stored, for invalid arguments, even for chunks that are stored already.
        """
        prefix = [] if prefix is None else prefix
        self._check(tokens, kv)
        if _length("prefix", prefix) % self._chunk_tokens:
            raise ConfigError(f"a prefix of {len(prefix)} tokens is not whole chunks of {self._chunk_tokens}")
        return self._do(lambda is_wanted: self._update(prefix, tokens, kv, is_wanted))

    def _update(
        self, prefix: Sequence[int], tokens: Sequence[int], kv: Sequence[TokenTensors], is_wanted: IsWanted
    ) -> int:
        num_prefix = len(prefix) // self._chunk_tokens
        chunks = self._names.continued(prefix, tokens)
        try:
            if not self._has_prefix(chunks, num_prefix):
                return 0
            num_there = self._store_chunks(chunks, num_prefix, kv, is_wanted)
            if num_prefix + num_there < len(chunks.names):
                chunks.trusted_until = float("-inf")
        finally:
            self._names.remember(chunks)
        return num_there * self._chunk_tokens

    def query(self, tokens: Sequence[int], kv: Sequence[TokenTensors]) -> int:
        """Fill the tensors of the leading tokens that are stored; returns how many tokens that is, in whole chunks.

        Tensors behind them may or may not be changed. Raises `ConfigError` for invalid arguments, before any tensor is
        filled.
        """
        self._check(tokens, kv)
        return self._do(lambda is_wanted: self._query(tokens, kv, is_wanted))

    def _query(self, tokens: Sequence[int], kv: Sequence[TokenTensors], is_wanted: IsWanted) -> int:
        names = self._names.of(tokens)
        tensor_bytes = self._tensor_bytes
        readers: list[ChunkReader] = []

        def make(index: int) -> ChunkReader:
            _stop_unless(is_wanted)
            tensors = self._tensors_of(kv, index)
            reader = ChunkReader(
                self._store, names[index], Scattered(target_addresses(tensors, tensor_bytes), tensor_bytes)
            )
            readers.append(reader)
            return reader

        if names:
            self._transfers.move(Direction.READ, len(names), self._store.num_segments, make)
        matched = _leading(readers)
        self._note_usable([reader.name for reader in matched])
        self._note_use([reader.name for reader in matched])
        for reader in reversed(matched):
            self._touch(reader.name, reader.used_at)
        for reader in readers[len(matched) :]:
            self._note_damage(reader)
        self._count(hit_chunks=len(matched), missed_chunks=len(names) - len(matched))
        return len(matched) * self._chunk_tokens

    def collect(self) -> None:
        """Apply the settings now: remove old chunks, what dead writers left behind, and chunks beyond the capacity."""
        self._do(lambda _: self._collect())

    def _collect(self) -> None:
        self._collect_own()
        if self._config.enable_global_gc:
            self._collect_all()

    def stats(self) -> Mapping[str, int]:
        """Counts since the start: hits, misses, damaged files by kind, chunks stored and removed.

        `refused_chunks` were not stored; of these, `no_room_chunks` because others used the capacity.
        """
        removed = self._room.counts
        # In a forked child, a thread of the parent may hold the lock forever.
        with self._lock if os.getpid() == self._pid else contextlib.nullcontext():
            return {
                **self._counts,
                "evicted_chunks": removed.evicted_chunks,
                "expired_chunks": removed.expired_chunks,
                "stale_temps": removed.stale_temps,
            }

    def close(self) -> None:
        """Wait for calls in progress and give everything back. Chunks stay. Repeated calls are harmless.

        From within a call, as from the caller's own sequences, it takes effect when that call ends. In a forked child
        it does nothing: everything belongs to the parent.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if threading.get_ident() in self._callers.values():
                self._is_closed_within_a_call = True
                return
            try:
                self._call_ended.wait_for(lambda: not self._callers)
            except BaseException:  # Ctrl-C
                self._is_closed = False
                raise
        self._release()

    def _do(self, work: Callable[[IsWanted], _Result]) -> _Result:
        """Do a call's work where no signal reaches it. Raises `TierUnavailable` if the cache is closed."""
        if os.getpid() != self._pid:
            raise TierUnavailable("this cache belongs to the process that opened it; open one after the fork")
        if self._is_closed:
            raise TierUnavailable(_CLOSED)

        def call(is_wanted: IsWanted) -> _Result:
            with self._call():
                return work(is_wanted)

        return self._apart.do(call)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """A call that `close` waits for. Raises `TierUnavailable` if the cache is closed."""
        call = object()
        with self._lock:
            if self._is_closed:
                raise TierUnavailable(_CLOSED)
            self._callers[call] = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                del self._callers[call]
                must_release = self._is_closed_within_a_call and not self._callers
                self._call_ended.notify_all()
            if must_release:
                self._release()

    def _release(self) -> None:
        self._closing.set()
        if self._keeper is not threading.current_thread():  # the garbage collector may have found this cache there
            self._keeper.join()
        self._transfers.close()
        self._apart.close()
        self._room.close()
        self._store.staging.clear()

    def _store_chunks(
        self, chunks: NamedChunks, num_prefix: int, kv: Sequence[TokenTensors], is_wanted: IsWanted
    ) -> int:
        """Store absent chunks; returns how many chunks behind the prefix are stored without a gap."""
        names = chunks.names[num_prefix:]
        statuses = [self._status_of(name) for name in names]
        for name, status in zip(names, statuses, strict=True):
            if status is not None:
                self._touch(name, status.st_mtime)
        absent = [index for index, status in enumerate(statuses) if status is None]
        if not absent:
            self._note_use(names)
            return len(names)
        begun_at = time.time()
        written = self._write([(names[index], index) for index in absent], chunks, kv, is_wanted)
        num_there = absent[written] if written < len(absent) else len(names)
        self._note_use(names[:num_there])
        if begun_at // BUCKET_S != time.time() // BUCKET_S:
            for name in reversed(names[:num_there]):  # otherwise the beginning, written first, would be colder
                self._touch(name, float("-inf"))
        return num_there

    def _write(
        self,
        absent: Sequence[tuple[ChunkName, int]],
        chunks: NamedChunks,
        kv: Sequence[TokenTensors],
        is_wanted: IsWanted,
    ) -> int:
        """Write chunks, named with their position in `kv`; returns how many leading ones are in place."""
        file_bytes, tensor_bytes = self._store.file_bytes, self._tensor_bytes
        writers: list[ChunkWriter] = []
        sources = contextlib.ExitStack()  # tensors of another cache among them stay in place meanwhile

        def make(number: int) -> ChunkWriter:
            _stop_unless(is_wanted)
            name, index = absent[number]
            tensors = self._tensors_of(kv, index)
            addresses = sources.enter_context(held_addresses(tensors, tensor_bytes))
            writer = ChunkWriter(self._store, name, Scattered(addresses, tensor_bytes))
            writers.append(writer)
            return writer

        granted = num_without_room = 0
        error = None
        try:
            granted = self._room.reserve(len(absent) * file_bytes, lambda: self._paths_to_keep(chunks, absent))
            num_without_room = len(absent) - granted // file_bytes
            if granted:
                with sources:
                    error = self._transfers.move(Direction.WRITE, granted // file_bytes, self._store.num_segments, make)
        except OSError as failure:
            error = failure
        finally:
            written = sum(writer.is_done for writer in writers) * file_bytes
            self._room.account_for(written=written, unused=granted - written)
        if error is not None:
            self._note_failure("write", error)
        num_written = len(_leading(writers))
        self._note_usable([writer.name for writer in writers if writer.is_done])
        self._count(
            stored_chunks=num_written, refused_chunks=len(absent) - num_written, no_room_chunks=num_without_room
        )
        return num_written

    def _paths_to_keep(self, chunks: NamedChunks, absent: Sequence[tuple[ChunkName, int]]) -> set[str]:
        """No chunk of a sequence is evicted to make room for its rest, except unreadable files in the rest's place."""
        path_of = self._store.path_of
        return {path_of(name) for name in chunks.names} - {path_of(name) for name, _ in absent}

    def _has_prefix(self, chunks: NamedChunks, num_prefix: int) -> bool:
        """Whether all chunks of the prefix are stored.

        For a long prefix, only the last chunk is checked if all were stored a moment ago and this cache has removed
        nothing since: a caller that stores a long sequence chunk by chunk must not check all of it each time.
        """
        begun_at = time.monotonic()
        num_removed = self._num_removed
        first = 0
        if (
            num_prefix > _ALWAYS_LOOKED_CHUNKS
            and begun_at < chunks.trusted_until
            and num_removed == chunks.trusted_removals
        ):
            first = num_prefix - 1
        for name in reversed(chunks.names[first:num_prefix]):  # the end is evicted first, so its use must be older
            status = self._status_of(name)
            if status is None:
                chunks.trusted_until = float("-inf")
                return False
            self._touch(name, status.st_mtime)
        if not first:
            now = time.monotonic()
            chunks.trusted_until = now + (now - begun_at) / _LOOK_SHARE
            chunks.trusted_removals = num_removed
        return True

    @property
    def _num_removed(self) -> int:
        """How many chunks this cache has removed so far, for any reason."""
        return self._num_damaged + self._room.counts.evicted_chunks + self._room.counts.expired_chunks

    def _status_of(self, name: ChunkName) -> os.stat_result | None:
        """The stat of a file that looks whole and that this cache has not failed to read. Never raises."""
        status = self._store.status_of(name)
        if status is None or not self._unusable:
            return status
        path = self._store.path_of(name)
        with self._lock:
            if self._unusable.get(path) == _kind_of(status):
                return None
        return status if os.access(path, os.R_OK, effective_ids=True) else None  # files are rarely closed to us alone

    def _check(self, tokens: Sequence[int], kv: Sequence[TokenTensors]) -> None:
        """Raises `ConfigError` unless `kv` has tensors for every token and layer, of the right size in whole chunks."""
        if _length("tokens", tokens) != _length("KV", kv):
            raise ConfigError(f"{len(tokens)} tokens, but the KV of {len(kv)}: the numbers must be equal")
        for position, layers in enumerate(kv):
            if _length("a token's KV", layers) != self._layer:
                raise ConfigError(f"token {position} has KV of {len(layers)} layers, not {self._layer}")
        check_tensors(kv)
        check_memory(kv[: len(kv) // self._chunk_tokens * self._chunk_tokens], self._tensor_bytes)

    def _tensors_of(self, kv: Sequence[TokenTensors], index: int) -> Sequence[TokenTensors]:
        """The tensors of one chunk."""
        first = index * self._chunk_tokens
        return kv[first : first + self._chunk_tokens]

    def _touch(self, name: ChunkName, used_at: float) -> None:
        """Set the file's time to the filesystem's now, unless it is close to it."""
        if abs(time.time() - used_at) > self._touch_s:
            with contextlib.suppress(OSError):
                os.utime(self._store.path_of(name))

    def _note_use(self, names: Sequence[ChunkName]) -> None:
        paths = [self._store.path_of(name) for name in names]
        with self._lock:
            self._used_paths.update(paths)

    def _note_damage(self, reader: ChunkReader) -> None:
        if reader.damage is None:
            return
        self._count(**{f"{reader.damage.value}_files": 1})
        path = self._store.path_of(reader.name)
        if reader.damage.is_ours_to_remove:
            with contextlib.suppress(OSError):
                os.unlink(path)
        status = self._store.status_of(reader.name)
        with self._lock:
            self._num_damaged += 1
            if status is not None and reader.errno not in _PASSING_ERRNOS:
                self._unusable[path] = _kind_of(status)
        self._log.warning(reader.damage.value, "chunk file %s is %s: a miss", path, reader.damage.value)

    def _note_usable(self, names: Sequence[ChunkName]) -> None:
        if self._unusable:
            with self._lock:
                for name in names:
                    self._unusable.pop(self._store.path_of(name), None)

    def _note_failure(self, act: str, error: OSError) -> None:
        self._count(**{f"{act}_failures": 1})
        self._log.warning(act, "chunk folder %s: %s failed: %s", self._config.root, act, error.strerror)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _keep(self) -> None:
        """The keeper's thread."""
        config = self._config
        now = time.monotonic()
        own_at, all_at = now + config.client_gc_interval, now + config.global_gc_interval
        try:
            self._room.sweep()  # chunks stay: a read-only client with a small capacity must not empty the folder
        except OSError as error:
            self._note_failure("collect", error)
        beat_s = max(_MIN_BEAT_S, min(BEAT_S, config.client_gc_interval, config.global_gc_interval))
        while not self._closing.wait(beat_s):
            now = time.monotonic()
            self._store.staging.trim()
            try:
                self._room.beat()
            except OSError as error:
                self._note_failure("collect", error)
            if now >= own_at:
                own_at = now + config.client_gc_interval
                self._collect_own()
            if config.enable_global_gc and now >= all_at:
                all_at = now + config.global_gc_interval
                self._collect_all()
        self._room.close()  # again: this thread may have used it when the garbage collector closed the cache

    def _collect_own(self) -> None:
        with self._lock:
            paths = frozenset(self._used_paths)
        try:
            gone = self._room.expire_of(paths, self._config.ttl)
        except OSError as error:
            self._note_failure("collect", error)
            return
        with self._lock:
            self._used_paths -= gone
        self._trim()

    def _collect_all(self) -> None:
        try:
            self._room.expire(self._config.global_ttl)
        except OSError as error:
            self._note_failure("collect", error)

    def _trim(self) -> None:
        try:
            self._room.trim()
        except OSError as error:
            self._note_failure("collect", error)


def _length(name: str, value: Sequence[object]) -> int:
    """Raises `ConfigError` if it is not a sequence."""
    try:
        value[:0]
        return len(value)
    except (TypeError, LookupError) as error:
        raise ConfigError(f"{name} must be a sequence, not {type(value).__name__}") from error


def _stop_unless(is_wanted: IsWanted) -> None:
    """Raises `_Unwanted`, which ends a call, after Ctrl-C in the thread that waits for it."""
    if not is_wanted():
        raise _Unwanted


def _kind_of(status: os.stat_result) -> tuple[int, int]:
    """The identity and permissions of a file: its time changes with every use."""
    return status.st_ino, status.st_mode


def _leading(chunks: Sequence[_Chunk]) -> Sequence[_Chunk]:
    """The chunks before the first that is not done."""
    for position, chunk in enumerate(chunks):
        if not chunk.is_done:
            return chunks[:position]
    return chunks
