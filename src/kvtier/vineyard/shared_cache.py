"""The shared-memory half of `KVCache`: a radix tree over tokens in a cache server's arena, live for every process.

Each token is a block of its own, named by a hash of itself and everything before it, so sequences share their common
beginnings and match at any length. Hits are read in place. Any thread may call. If the server goes down after
construction, updates store nothing and queries miss, until it is back.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence, Sized

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.client.connecting import connect
from kvtier.errors import ConfigError, LeaseError, TierError, TierFull, TierTimeout, TierUnavailable
from kvtier.memory.copying import address_of, copy_blocks
from kvtier.memory.lease import Lease, Reservation
from kvtier.vineyard.held_tokens import FoundTokens, HeldTokens
from kvtier.vineyard.kv_tensor import TokenTensors, check_shape, check_tensors, held_addresses, point_tensors
from kvtier.vineyard.scope import ClosedAtExit
from kvtier.vineyard.seen_prefixes import SeenPrefixes
from kvtier.vineyard.token_bound import TokenBound
from kvtier.vineyard.token_chain import TokenChain
from kvtier.vineyard.tree_clients import TreeClients, close_abandoned
from kvtier.vineyard.vineyard_config import VineyardCacheConfig
from kvtier.vineyard.whole_numbers import whole_number
from kvtier.workers import Workers

logger = logging.getLogger(__name__)

MAX_LAYERS = 1 << 16
MAX_TOKEN_BYTES = 1 << 40
COPY_THREADS = min(4, os.cpu_count() or 1)

_TENSOR_ALIGN_BYTES = 64
_PART_BYTES = 256 << 20
_PART_TOKENS = 1 << 16
"""Tokens per request: this takes a fraction of the default timeout, and servers accept eight times as many."""
_SHARED_COPY_BYTES = 8 << 20
_SHARED_TENSOR_BYTES = 32 << 10
_PENDING_S = 2.0
_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.05
_COUNTS = ("hit_tokens", "missed_tokens", "stored_tokens", "refused_tokens", "pruned_tokens")


class SharedCache(ClosedAtExit):
    """KV of tokens in shared memory: `layer` pairs of `tensor_bytes` for each of at most `cache_capacity` tokens.

    Tensors that `query` has pointed into the cache are read in place, without a copy. Their bytes stay unchanged, safe
    from eviction, until the last of a query's tensors, and of the arrays made of them, is gone, or until `release` or
    `close`; after that, the tensors give neither address nor bytes. Addresses read from a tensor are valid no longer
    than that. One process may hold as much in this way as the server allows a client, by default half of its memory;
    a query that would hold more matches less.
    """

    def __init__(self, config: VineyardCacheConfig, *, tensor_bytes: int, cache_capacity: int, layer: int) -> None:
        """Raises `ConfigError` for bad sizes, `TierUnavailable` if the server does not answer, and `TierRefused` if it
        refuses blocks of this size.
        """
        tensor_bytes = whole_number("tensor_bytes", tensor_bytes, most=MAX_TOKEN_BYTES)
        cache_capacity = whole_number("cache_capacity", cache_capacity)
        layer = whole_number("layer", layer, most=MAX_LAYERS)
        stride = -(-tensor_bytes // _TENSOR_ALIGN_BYTES) * _TENSOR_ALIGN_BYTES
        if 2 * layer * stride > MAX_TOKEN_BYTES:
            raise ConfigError(f"{layer} layers of tensors of {tensor_bytes} bytes exceed a tebibyte per token")
        self._tensor_bytes = tensor_bytes
        self._layer = layer
        self._capacity = cache_capacity
        self._offsets = tuple(range(0, 2 * layer * stride, stride))
        close_abandoned()
        self._pid = os.getpid()
        self._holds: weakref.WeakSet[HeldTokens] = weakref.WeakSet()
        self._is_closed = False
        self._num_calls = 0
        self._copiers = Workers(COPY_THREADS, "kvtier-vineyard-copy")
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._lock = threading.Condition()
        # Bytes, whatever they mean: one "head" of `stride` of them for each of K and V.
        layout = KvLayout(layers=layer, kv_heads=1, head_dim=stride, dtype="float8_e4m3fn", block_tokens=1)
        namespace = _namespace(config.llm_cache_object_name, tensor_bytes, layer)
        self._chain = TokenChain(namespace)
        self._seen = SeenPrefixes()
        with contextlib.ExitStack() as stack:
            self._reader = stack.enter_context(_connect(config, layout, namespace))
            self._writer = stack.enter_context(_connect(config, layout, namespace))
            self._bound = TokenBound(self._writer, namespace, capacity=cache_capacity, timeout_s=config.timeout_s)
            stack.pop_all()
        self._clients = TreeClients(self._reader, self._writer, self._bound)

    def update(self, prefix: Sequence[int] | None, tokens: Sequence[int], kv: Sequence[TokenTensors]) -> int:
        """Store the KV of `tokens`, which follow `prefix`. Returns how many leading ones of them are cached now.

        That includes tokens cached before, whose KV is not read. It is 0 if not all of `prefix` is cached, and less
        than all if the sequence exceeds `cache_capacity` or the available room. For a long prefix that this object has
        seen whole within the last second, only the end is looked up. The caller's memory is read until this returns;
        tensors of a cache cannot be released meanwhile. Raises `ConfigError`, before anything is stored, for KV of
        another length or size.
        """
        check_shape(kv, _num_tokens(tokens), self._layer)
        with self._call(), held_addresses(kv, self._tensor_bytes) as sources:
            return self._update(prefix, tokens, sources)

    def _update(self, prefix: Sequence[int] | None, tokens: Sequence[int], sources: Sequence[int]) -> int:
        num_before = 0 if prefix is None else _num_tokens(prefix)
        hashes = self._chain.hashes(() if prefix is None else prefix, tokens)
        del hashes[self._capacity :]
        if len(hashes) < max(1, num_before):
            return 0
        num_present = 0
        seen_at_ns = self._seen.used_at_ns(hashes[num_before - 1]) if num_before else None
        if seen_at_ns is not None:
            num_present = self._extend(hashes, num_before, num_before - 1, sources, seen_at_ns)
        if not num_present:
            num_present = self._extend(hashes, num_before, 0, sources, time.monotonic_ns())
        if num_present < num_before:
            return 0
        self._count("refused_tokens", num_before + len(tokens) - num_present)
        self._count("pruned_tokens", self._bound.enforce(hashes, num_present))
        return num_present - num_before

    def _extend(
        self, hashes: Sequence[BlockHash], num_before: int, first: int, sources: Sequence[int], used_at_ns: int
    ) -> int:
        """Store what is missing behind the prefix of `num_before`; only the part of it after `first` is looked up.

        Returns how many leading tokens are cached now; 0 if not all of the prefix is. `used_at_ns` is when those before
        `first` were seen: the others also count as used then, so that no end is warmer than its beginning.
        """
        with self._leased(hashes[first:] if first else hashes) as num_found:
            num_present = first + num_found
            if num_present < num_before:
                return 0
            if num_present < len(hashes):
                first_source = (num_present - num_before) * len(self._offsets)
                num_stored = self._store(hashes[num_present:], sources[first_source:])
                num_present += num_stored
                self._count("stored_tokens", num_stored)
            self._bound.touch(hashes[first:num_present], used_at_ns - first)
            if num_present:
                self._seen.note(hashes[num_present - 1], num_present, used_at_ns)
        return num_present

    def query(self, tokens: Sequence[int], kv: Sequence[TokenTensors]) -> int:
        """Point the tensors of the longest cached prefix into the cache. Returns its number of tokens.

        The other tensors stay unchanged. Raises `ConfigError`, before any tensor is pointed, for KV of another length
        or with other objects.
        """
        check_shape(kv, _num_tokens(tokens), self._layer)
        check_tensors(kv)
        with self._call():
            addresses, hold = self._find(tokens)
            if hold is not None:
                point_tensors(kv, addresses, self._offsets, self._tensor_bytes, hold)
        return len(addresses)

    def query_addresses(self, tokens: Sequence[int]) -> FoundTokens:
        """Like `query`, for callers that need addresses rather than an object for each tensor."""
        _num_tokens(tokens)
        with self._call():
            addresses, hold = self._find(tokens)
            return FoundTokens(addresses, self._offsets, self._tensor_bytes, hold)

    def stats(self) -> Mapping[str, int]:
        """Counts of this object: tokens that queries found or missed, that updates stored, could not store, or pruned.

        `held_queries` is the number of queries whose tensors hold memory now.
        """
        with contextlib.nullcontext() if self._is_inherited else self._lock:
            return {**self._counts, "held_queries": sum(not hold.is_over for hold in self._holds)}

    def release(self) -> None:
        """Release the hits of all queries; their tensors can no longer be read.

        Raises `LeaseError` while arrays or views of some of them are in use; those stay, the others are released. Does
        nothing in a forked child: everything belongs to the parent.
        """
        if self._is_inherited:
            return
        in_use: LeaseError | None = None
        with self._lock:
            holds = list(self._holds)
        for hold in holds:
            try:
                hold.end()
            except LeaseError as error:
                in_use = error
        self._release_forgotten()
        if in_use is not None:
            raise LeaseError(str(in_use))

    def close(self) -> None:
        """Wait for calls in progress, release everything, disconnect; stored tokens stay. A second call does nothing.

        Raises `LeaseError`, and stays open, while arrays or views of tensors are in use. Does nothing in a forked
        child: everything belongs to the parent.
        """
        if self._is_inherited:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            with self._lock:
                self._lock.wait_for(lambda: not self._num_calls)
            self.release()
        except BaseException:  # arrays are in use, or Ctrl-C
            self._is_closed = False
            raise
        self._copiers.close()
        self._clients.close()

    # --- private: reading ------------------------------------------------------------------------------------------

    def _find(self, tokens: Sequence[int]) -> tuple[list[int], HeldTokens | None]:
        """The addresses of the tokens of the longest cached prefix, and the hold that keeps them."""
        hashes = self._chain.hashes(tokens)
        used_at_ns = time.monotonic_ns()
        addresses, hold = self._hold(hashes)
        if addresses:
            self._bound.touch(hashes[: len(addresses)], used_at_ns)
            self._seen.note(hashes[len(addresses) - 1], len(addresses), used_at_ns)
        self._count("hit_tokens", len(addresses))
        self._count("missed_tokens", len(hashes) - len(addresses))
        return addresses, hold

    def _hold(self, hashes: Sequence[BlockHash]) -> tuple[list[int], HeldTokens | None]:
        addresses: list[int] = []
        mappings: list[object] = []
        with contextlib.ExitStack() as undo:
            leases: list[Lease] = []
            for part in _parts(hashes):
                lease = self._reader.match(part)
                undo.callback(lease.release)
                found, mapping = self._locate(lease)
                addresses += found
                mappings.append(mapping)
                leases.append(lease)
                if len(found) < len(part):
                    break
            if not addresses:
                return [], None
            undo.pop_all()
        hold = HeldTokens(leases, (mappings, self._clients), self._clients.forgotten)
        with self._lock:
            self._holds.add(hold)
        return addresses, hold

    def _locate(self, lease: Lease) -> tuple[list[int], object]:
        """The addresses of the leased tokens, and what keeps that memory mapped, unless the lease does."""
        if not lease.wait():
            return [], None
        if lease.arena is not None:
            start = lease.arena.address
            return [start + offset for offset in lease.offsets], lease.arena.exports([0], 1)
        if lease.has_views:
            return [address_of(view) for view in lease.views()], None
        return self._fetch(lease)

    def _fetch(self, lease: Lease) -> tuple[list[int], bytearray]:
        """A copy, in this process's memory, of tokens on another host."""
        block_bytes = self._reader.layout.block_bytes
        memory = bytearray(lease.num_blocks * block_bytes)
        whole = memoryview(memory)
        with lease:
            count = lease.fetch([whole[start : start + block_bytes] for start in range(0, len(memory), block_bytes)])
        start = address_of(whole)
        return list(range(start, start + count * block_bytes, block_bytes)), memory

    # --- private: writing ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _leased(self, hashes: Sequence[BlockHash]) -> Iterator[int]:
        """How many leading tokens are cached; they are leased, as far as one client may."""
        num_present = 0
        with contextlib.ExitStack() as leases:
            for part in _parts(hashes):
                lease = leases.enter_context(self._writer.match(part))
                num_leased = lease.wait()
                num_present += num_leased
                if num_leased < len(part):
                    if lease.ended is MatchEnd.LIMIT:  # there may be more
                        num_present += self._num_leading(hashes[num_present:])
                    break
            yield num_present

    def _store(self, hashes: Sequence[BlockHash], sources: Sequence[int]) -> int:
        """Store tokens whose tensors are at `sources`. Returns how many leading ones are cached now."""
        num_stored = 0
        step = min(_PART_TOKENS, max(1, _PART_BYTES // self._writer.layout.block_bytes))
        deadline = time.monotonic() + _PENDING_S
        look_s = _FIRST_LOOK_S
        try:
            with contextlib.ExitStack() as held:
                while num_stored < len(hashes):
                    part = hashes[num_stored : num_stored + step]
                    first = num_stored * len(self._offsets)
                    of_part = sources[first : first + len(part) * len(self._offsets)]
                    if self._writer.is_local:
                        # Open until all is stored: no part of a sequence is evicted to make room for its end.
                        reservation = held.enter_context(self._writer.reserve(part))
                        self._write(reservation, of_part)
                        is_whole = not reservation.num_pending and not reservation.num_refused
                    else:
                        is_whole = self._send(part, of_part)
                    num_leading = len(part) if is_whole else self._num_leading(part)
                    num_stored += num_leading
                    if not num_leading:
                        if time.monotonic() > deadline:
                            break
                        time.sleep(look_s)  # another process is writing it
                        look_s = min(2 * look_s, _LAST_LOOK_S)
        except (TierError, TierFull) as error:
            logger.debug("%d of %d tokens stored: %s", num_stored, len(hashes), error)
        return num_stored

    def _write(self, reservation: Reservation, sources: Sequence[int]) -> None:
        """Copy the tensors of the reserved tokens to their places and make them visible to all."""
        if not reservation.num_blocks:
            return
        arena = reservation.arena
        assert arena is not None
        width = len(self._offsets)
        targets: list[int] = []
        wanted: list[int] = []
        for offset, position in zip(reservation.offsets, reservation.positions, strict=True):
            start = arena.address + offset
            targets += [start + each for each in self._offsets]
            wanted += sources[position * width : (position + 1) * width]
        with arena.in_use():
            for offset in reservation.offsets:
                arena.populate(offset, self._writer.layout.block_bytes)
            self._copy(targets, wanted)
        reservation.commit()

    def _send(self, hashes: Sequence[BlockHash], sources: Sequence[int]) -> bool:
        """For a server whose memory is not written in place: gather here first. True if it took every token."""
        block_bytes = self._writer.layout.block_bytes
        memory = memoryview(bytearray(len(hashes) * block_bytes))
        start = address_of(memory)
        targets = [start + token * block_bytes + offset for token in range(len(hashes)) for offset in self._offsets]
        self._copy(targets, sources)
        blocks = [memory[first : first + block_bytes] for first in range(0, len(memory), block_bytes)]
        return self._writer.set(hashes, blocks) == len(hashes)

    def _copy(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Uses several threads for large copies, in pieces long enough that they do not wait for the GIL."""
        count = len(targets)
        if self._tensor_bytes < _SHARED_TENSOR_BYTES or count * self._tensor_bytes < _SHARED_COPY_BYTES:
            copy_blocks(targets, sources, self._tensor_bytes)
            return
        bounds = [count * part // COPY_THREADS for part in range(COPY_THREADS + 1)]
        self._copiers.map(
            lambda part: copy_blocks(targets[part], sources[part], self._tensor_bytes),
            [slice(start, end) for start, end in itertools.pairwise(bounds)],
        )

    def _num_leading(self, hashes: Sequence[BlockHash]) -> int:
        flags = self._writer.contains(hashes)
        return flags.index(False) if False in flags else len(flags)

    # --- private: small --------------------------------------------------------------------------------------------

    @property
    def _is_inherited(self) -> bool:
        """This is a forked child. Locks may be held by threads that do not exist here, and calls never end."""
        return os.getpid() != self._pid

    def _release_forgotten(self) -> None:
        """End the leases of queries whose tensors are all gone, and what other caches have left open."""
        close_abandoned()
        self._clients.release_forgotten()

    def _count(self, name: str, count: int) -> None:
        with self._lock:
            self._counts[name] += count

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """A call that `close` waits for. Raises `TierUnavailable` if the cache is closed, or the parent's."""
        if self._is_inherited:
            raise TierUnavailable("this cache belongs to the process that opened it; open one after the fork")
        with self._lock:
            if self._is_closed:
                raise TierUnavailable("this cache is closed")
            self._num_calls += 1
        try:
            self._release_forgotten()
            yield
        finally:
            with self._lock:
                self._num_calls -= 1
                self._lock.notify_all()


def _num_tokens(tokens: Sequence[int]) -> int:
    """Raises `ConfigError` for anything without an order or a length. Arrays and the like count as sequences."""
    if not isinstance(tokens, Sized) or not hasattr(tokens, "__getitem__") or isinstance(tokens, Mapping):
        raise ConfigError(f"tokens are a sequence of token ids, not a {type(tokens).__name__}")
    try:
        return len(tokens)
    except TypeError as error:  # a zero-dimensional array
        raise ConfigError(f"tokens are a sequence of token ids: {error}") from error


def _parts(hashes: Sequence[BlockHash]) -> Iterator[Sequence[BlockHash]]:
    """Runs small enough for one request each."""
    if len(hashes) <= _PART_TOKENS:
        yield hashes
        return
    for first in range(0, len(hashes), _PART_TOKENS):
        yield hashes[first : first + _PART_TOKENS]


def _namespace(name: str, tensor_bytes: int, layer: int) -> Namespace:
    fields = {"kind": "vineyard", "name": name, "tensor_bytes": tensor_bytes, "layers": layer}
    return Namespace(hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest())


def _connect(config: VineyardCacheConfig, layout: KvLayout, namespace: Namespace) -> CacheClient:
    try:
        return connect(
            config.address,
            layout=layout,
            namespace=namespace,
            name=config.llm_cache_object_name[:256],
            token=config.token,
            ca_file=config.ca_file,
            timeout_s=config.timeout_s,
        )
    except (TierTimeout, TierUnavailable) as error:
        raise TierUnavailable(f"no cache server answers at {config.address}: {error}") from error
