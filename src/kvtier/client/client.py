"""The client of one cache server: match, get, set and the rest, over shared memory or TCP. Thread-safe.

What serves a request (match, get, stream_get, set, contains) never raises for a server that is dead, slow or full: it
answers with less, and counts why. What an operator asks for (info, stats, pin, drop, flush) raises.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import xxhash

from kvtier.blocks.hashing import HASH_BYTES, BlockHash, block_hashes, join_hashes, split_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.client.connection import Connection
from kvtier.client.endpoint import Endpoint
from kvtier.client.known_namespace import KnownNamespace, read_namespaces
from kvtier.client.workers import Workers
from kvtier.errors import (
    BlockCorrupt,
    ConfigError,
    RemoteProtocolError,
    TierError,
    TierFull,
    TierRefused,
    TierUnavailable,
)
from kvtier.memory.checksum import start_checksum
from kvtier.memory.copying import Buffer, byte_views
from kvtier.memory.lease import BlockLease, EmptyLease, Lease, Reservation
from kvtier.memory.mapped import MappedArena
from kvtier.observe.metrics import TierMetrics
from kvtier.transport.address import Address
from kvtier.wire import messages as wire
from kvtier.wire.frames import MAX_HASHES

logger = logging.getLogger(__name__)

DEFAULT_TRANSFER_CONNECTIONS = min(4, max(2, (os.cpu_count() or 1) // 4))
_SLOWEST_BYTES_PER_S = 64e6
_FRAME_BYTES = 32 << 20
_FIRST_PART_BYTES = 2 << 20
_PART_BYTES = 32 << 20
_MAX_NOTES_WAITING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How to talk to cache servers; the same for each of several.

    `timeout_s` bounds every call; a transfer gets a second more per 64 MB. `transfer_connections` share one large
    transfer over TCP: by default one for every four cores, from two to four. `ca_file` turns TLS on and names who
    signed the server's certificate.
    """

    token: bytes | None = None
    ca_file: Path | None = None
    timeout_s: float = 1.0
    max_connections: int = 8
    transfer_connections: int = DEFAULT_TRANSFER_CONNECTIONS

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, not {self.timeout_s}")
        if self.max_connections <= 0 or not 0 < self.transfer_connections <= self.max_connections:
            raise ConfigError("max_connections must be positive and not less than transfer_connections")

    def tls(self) -> ssl.SSLContext | None:
        if self.ca_file is None:
            return None
        try:
            return ssl.create_default_context(cafile=str(self.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot use the certificates in {self.ca_file}: {error}") from error


class Note(Protocol):
    """Something to be said of a request."""

    @property
    def request_id(self) -> str: ...

    def to_json(self) -> str: ...


class CacheClient(Protocol):
    """What one server and several have in common. `hashes` are those of a prompt's blocks in order."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def metrics(self) -> TierMetrics: ...

    def hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        """The hashes of the full blocks of `tokens` in this client's namespace."""
        ...

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """Lease the longest cached prefix. Empty, never an exception, when the server does not answer."""
        ...

    def get(self, hashes: Sequence[BlockHash], into: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        """Fill `into` with the longest cached prefix. Returns how many blocks; the rest of `into` is undefined."""
        ...

    def stream_get(
        self, hashes: Sequence[BlockHash], into: Sequence[Buffer] | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """The longest cached prefix a block at a time, as `(position, view)`, each as soon as it is there.

        The view is `into[position]`, filled; without `into` it is valid until the next step only.
        """
        ...

    def set(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[Buffer],
        *,
        deferred: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Store blocks; returns how many were written (those already there are not written again).

        When it returns the caller's buffers are free. With `deferred` it returns before the server has confirmed;
        `flush` waits for that. Raises `TierFull` when there was room for none of them.
        """
        ...

    def contains(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[bool]: ...

    def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Keep what is cached of `hashes` until `unpin` or `drop`. Returns how many blocks."""
        ...

    def unpin(self, hashes: Sequence[BlockHash]) -> int: ...

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        """Forget `hashes`, or everything of this namespace. Returns how many blocks went."""
        ...

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until all that was set before, deferred too, is in the cache."""
        ...

    @property
    def num_returns(self) -> tuple[int, ...]:
        """For each server, how often it was away and came back, the same or another one."""
        ...

    def info(self) -> dict[str, object]: ...

    def stats(self) -> dict[str, object]: ...

    def namespaces(self) -> list[KnownNamespace]:
        """Every namespace that is cached or in use."""
        ...

    def presence(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> list[int]:
        """Where each of `hashes` is, of any namespace: LISTED_ flags (see `wire.messages`). Uses none of them."""
        ...

    def note(self, note: Note) -> None:
        """Have a server keep what is to be said of a request, soon. Lost without a word when it does not answer."""
        ...

    def noted(self, request_id: str) -> str | None:
        """What was noted of a request, unless it is too long ago."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SingleClient:
    """A `CacheClient` of one server. Without a layout it can only be asked about the server and what it holds."""

    def __init__(
        self,
        address: Address,
        *,
        layout: KvLayout | None,
        namespace: Namespace | None,
        name: str,
        options: ClientOptions,
        metrics: TierMetrics,
        fields: str = "",
    ) -> None:
        """`fields` is what `namespace` covers, as JSON, for people to read in the server's `info`."""
        self.address = address
        self.metrics = metrics
        self._layout = layout
        self._namespace = namespace
        self._options = options
        self._label = str(address)
        self._endpoint = Endpoint(
            address,
            namespace=namespace,
            name=name,
            block_bytes=layout.block_bytes if layout else 0,
            block_tokens=layout.block_tokens if layout else 0,
            fields=fields,
            token=options.token,
            tls=options.tls(),
            max_connections=options.max_connections,
            metrics=metrics,
            metrics_label=self._label,
        )
        self._transfers = Workers(options.transfer_connections, "kvtier-transfer")
        self._note_places = threading.Semaphore(_MAX_NOTES_WAITING)

    # --- identity --------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> KvLayout:
        if self._layout is None:
            raise ConfigError("this client has no layout: pass layout= and namespace= to connect()")
        return self._layout

    @property
    def is_up(self) -> bool:
        """The breaker is closed: the next call will be tried."""
        return not self._endpoint.breaker.is_open

    @property
    def is_local(self) -> bool:
        return self._endpoint.is_local

    @property
    def has_disk(self) -> bool:
        """The server said so when a connection was made; False until then."""
        return self._endpoint.has_disk

    @property
    def num_returns(self) -> tuple[int, ...]:
        return (self._endpoint.num_returns,)

    @property
    def arena(self) -> MappedArena:
        """The server's memory as this process maps it: what lease offsets are places in, and what CUDA registers.

        Another one after the server was restarted. Raises `TierUnavailable` without a server on this host.
        """
        return self._endpoint.arena

    def hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        layout = self.layout
        assert self._namespace is not None
        return block_hashes(self._namespace, tokens, layout.block_tokens)

    def ping(self) -> None:
        """Raises a `TierError` when the server does not answer or refuses this client."""
        deadline = self._deadline(None)
        with self._endpoint.connection(deadline) as connection:
            connection.call(wire.Ping(), wire.Done, deadline)

    # --- reading ---------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return self._match_any(hashes, timeout_s, is_lazy=False)

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """As `match`, but reads nothing from disk: the lease is on what is in memory, and counts what could be read.

        A later match of just those blocks, or of some of them, reads and leases them.
        """
        return self._match_any(hashes, timeout_s, is_lazy=True)

    def _match_any(self, hashes: Sequence[BlockHash], timeout_s: float | None, *, is_lazy: bool) -> Lease:
        self._check()
        if not hashes:
            return EmptyLease(MatchEnd.ALL)
        number = self._endpoint.next_number()
        try:
            return self._match(number, hashes[:MAX_HASHES], self._deadline(timeout_s), is_lazy=is_lazy)
        except TierError as error:
            self._endpoint.count_failure(error)
            ended = MatchEnd.TIER_DOWN
        except TierFull:
            ended = MatchEnd.LIMIT
        self.metrics.missed_blocks.labels(tier=self._label).inc(len(hashes))
        return EmptyLease(ended)

    def get(self, hashes: Sequence[BlockHash], into: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        count = min(len(hashes), len(into))
        if self.is_local:
            with self.match(hashes[:count], timeout_s=timeout_s) as lease:
                return lease.fetch(into)
        self._check()
        buffers = byte_views(into[:count], self.layout.block_bytes, writable=True)
        num_hit = self._pull(hashes[:count], buffers, timeout_s)
        self.metrics.hit_blocks.labels(tier=self._label).inc(num_hit)
        self.metrics.missed_blocks.labels(tier=self._label).inc(count - num_hit)
        return num_hit

    def stream_get(
        self, hashes: Sequence[BlockHash], into: Sequence[Buffer] | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        self._check()
        if into is not None:
            hashes = hashes[: len(into)]
        buffers = None if into is None else byte_views(into[: len(hashes)], self.layout.block_bytes, writable=True)
        hashes = hashes[:MAX_HASHES]
        if not hashes:
            return iter(())
        return self._stream_local(hashes, buffers) if self.is_local else self._stream_remote(hashes, buffers)

    def contains(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[bool]:
        self._check()
        deadline = self._deadline(timeout_s)
        flags: list[bool] = []
        try:
            for first in range(0, len(hashes), MAX_HASHES):
                part = hashes[first : first + MAX_HASHES]
                with self._endpoint.connection(deadline) as connection:
                    request = wire.ContainsRequest(connection.space, _joined(part))
                    reply = connection.call(request, wire.Contained, deadline)
                    flags += map(bool, reply.flags.ljust(len(part), b"\0")[: len(part)])
        except TierError as error:
            self._endpoint.count_failure(error)
        return flags + [False] * (len(hashes) - len(flags))

    # --- writing ---------------------------------------------------------------------------------------------------

    def set(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[Buffer],
        *,
        deferred: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        return len(self.store(hashes, blocks, deferred=deferred, timeout_s=timeout_s))

    def store(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[Buffer],
        *,
        deferred: bool = False,
        timeout_s: float | None = None,
    ) -> list[int]:
        """As `set`, but returns the positions that were written."""
        self._check()
        if len(hashes) != len(blocks):
            raise ConfigError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        views = byte_views(blocks, self.layout.block_bytes, writable=False)
        if not hashes:
            return []
        try:
            store = self._set_local if self.is_local else self._set_remote
            stored = store(hashes, views, deferred, timeout_s)
        except TierError as error:
            self._endpoint.count_failure(error)
            return []
        except TierFull:
            self.metrics.refused_blocks.labels(tier=self._label).inc(len(hashes))
            raise
        self.metrics.stored_blocks.labels(tier=self._label).inc(len(stored))
        return stored

    def reserve(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Reservation:
        """Slots in the server's arena for the absent ones of `hashes`, to be written in place.

        Only for a server on this host. Raises `TierFull` when some are absent and there is room for none, and
        `TierError` when the server does not answer.
        """
        self._check()
        if not self.is_local:
            raise ConfigError("slots can be written in place only on a server of this host (unix:...)")
        return self._reserve_slots(self._endpoint.next_number(), hashes, timeout_s)[0]

    # --- operating -------------------------------------------------------------------------------------------------

    def pin(self, hashes: Sequence[BlockHash]) -> int:
        return self._count(lambda space, part: wire.PinRequest(space, part, True), hashes)

    def unpin(self, hashes: Sequence[BlockHash]) -> int:
        return self._count(lambda space, part: wire.PinRequest(space, part, False), hashes)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        if hashes is not None and not hashes:
            return 0
        return self._count(wire.DropRequest, hashes or ())

    def list_blocks(self) -> list[tuple[BlockHash, int]]:
        """Every hash cached in this namespace with its LISTED_ flags (see `wire.messages`)."""
        self._check()
        found: dict[BlockHash, int] = {}
        first = 0
        while True:
            deadline = self._deadline(None)
            with self._endpoint.connection(deadline) as connection:
                listed = connection.call(wire.ListRequest(connection.space, first), wire.Listed, deadline)
            found.update(zip(split_hashes(listed.hashes), listed.flags, strict=True))
            if listed.next_first <= first:
                return list(found.items())
            first = listed.next_first

    def verify(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Have the server read these from its disk; False where a block was not what was written. It is gone then."""
        self._check()
        deadline = self._deadline(None, len(hashes) * self.layout.block_bytes)
        with self._endpoint.connection(deadline) as connection:
            request = wire.VerifyRequest(connection.space, _joined(hashes))
            return list(map(bool, connection.call(request, wire.Contained, deadline).flags))

    def flush(self, *, timeout_s: float | None = None) -> None:
        deadline = self._deadline(timeout_s) + (0 if timeout_s is not None else 60.0)
        self._endpoint.wait_for_chores(deadline)
        with self._endpoint.connection(deadline) as connection:
            connection.call(wire.Flush(), wire.Done, deadline)

    def info(self) -> dict[str, object]:
        return self._document(wire.InfoRequest())

    def stats(self) -> dict[str, object]:
        return self._document(wire.StatsRequest())

    def namespaces(self) -> list[KnownNamespace]:
        return read_namespaces(self.info())

    def presence(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> list[int]:
        return self._presence(namespace, hashes, self._deadline(None))

    def look(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[int]:
        """As `presence`, of this client's namespace, for a request: LISTED_DOWN when the server does not answer."""
        self._check()
        try:
            return self._presence(self._digest_namespace(), hashes, self._deadline(timeout_s))
        except TierError as error:
            self._endpoint.count_failure(error)
            return [wire.LISTED_DOWN] * len(hashes)

    def note(self, note: Note) -> None:
        """Nothing is noted while the server is down, or more than a note may be, or many are on their way."""
        try:
            request = wire.NoteRequest(note.request_id, note.to_json())
        except ValueError as error:
            self._endpoint.count_failure(TierRefused(str(error)))
            return
        if self.is_up and self._note_places.acquire(blocking=False):
            self._endpoint.do_later(functools.partial(self._send_note, request))

    def noted(self, request_id: str) -> str | None:
        try:
            request = wire.NotedRequest(request_id)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        deadline = self._deadline(None)
        with self._endpoint.connection(deadline) as connection:
            return connection.call(request, wire.Document, deadline).text or None

    def close(self) -> None:
        """Give back every lease and disconnect. Leases still open must not be used any more."""
        self._transfers.close()
        self._endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- private: reading ------------------------------------------------------------------------------------------

    def _match(self, number: int, hashes: Sequence[BlockHash], deadline: float, *, is_lazy: bool) -> Lease:
        try:
            with self._endpoint.connection(deadline) as connection:
                request = wire.MatchRequest(connection.space, _joined(hashes), number, is_lazy)
                matched = connection.call(request, wire.Matched, deadline)
                arena = self._endpoint.arena_of(connection) if self.is_local else None
                offsets = self._offsets_in(arena, matched.offsets)
                if len(offsets) + matched.num_stored > len(hashes):
                    raise RemoteProtocolError("the server matched more blocks than it was asked for")
                server_id = connection.welcome.server_id
        except TierRefused:
            raise
        except BaseException:  # an interrupt too: the server may have granted it
            self._release_later(number)
            raise
        num_found = len(offsets) + matched.num_stored
        self.metrics.hit_blocks.labels(tier=self._label).inc(num_found)
        self.metrics.missed_blocks.labels(tier=self._label).inc(len(hashes) - num_found)
        if not offsets:
            return EmptyLease(matched.match_end, matched.num_stored)
        return BlockLease(
            arena,
            offsets,
            self.layout.block_bytes,
            hashes[: len(offsets)],
            matched.match_end,
            lambda wanted, into: self._pull(wanted, into, None),
            lambda count: self._await(number, count, server_id),
            matched.num_ready,
            lambda: self._end(wire.Release(number), server_id),
            lambda: self._endpoint.forget(lambda: self._end_now(wire.Release(number), server_id)),
            num_stored=matched.num_stored,
        )

    def _await(self, number: int, count: int, server_id: bytes) -> int:
        """How many of the first `count` blocks of a lease have come from disk; waits for them."""
        deadline = self._deadline(None, count * self.layout.block_bytes)
        try:
            with self._endpoint.connection(deadline) as connection:
                if connection.welcome.server_id != server_id:
                    raise TierUnavailable("the server that loaded these blocks is gone")
                return connection.call(wire.Await(number, count), wire.Counted, deadline).count
        except TierError as error:
            self._endpoint.count_failure(error)
            return 0

    def _pull(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], timeout_s: float | None) -> int:
        """Get over TCP, shared by `transfer_connections`. Returns the leading blocks that arrived."""
        hashes = hashes[:MAX_HASHES]
        parts = self._parts(len(hashes)) if hashes else []
        if not parts:
            return 0
        if len(parts) == 1:
            return self._pull_part(hashes, into, timeout_s)

        def pull(part: slice) -> int:
            return self._pull_part(hashes[part], into[part], timeout_s)

        try:
            counts = self._transfers.map(pull, parts)
        except TierUnavailable as error:
            self._endpoint.count_failure(error)
            return 0
        total = 0
        for part, count in zip(parts, counts, strict=True):
            if total == part.start:
                total += count
        return total

    def _pull_part(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], timeout_s: float | None) -> int:
        block_bytes = self.layout.block_bytes
        deadline = self._deadline(timeout_s, len(hashes) * block_bytes)
        arrived = 0
        try:
            with self._endpoint.connection(deadline) as connection:
                frame_blocks = max(1, _FRAME_BYTES // block_bytes)
                request = wire.GetRequest(connection.space, _joined(hashes), frame_blocks)
                number = connection.send(request, deadline=deadline)
                for blocks in connection.receive_blocks(
                    number,
                    lambda blocks: list(into[blocks.first : blocks.first + blocks.count]),
                    _Verifier(self._digest_namespace(), hashes).taste,
                    lambda: deadline,
                ):
                    arrived += blocks.count
        except TierError as error:
            self._endpoint.count_failure(error)
        return min(arrived, len(into))

    def _stream_local(
        self, hashes: Sequence[BlockHash], into: list[memoryview] | None
    ) -> Iterator[tuple[int, memoryview]]:
        with self.match(hashes) as lease:
            for position in range(lease.num_blocks):
                if lease.wait(position + 1) <= position:
                    return
                view = lease.views(position, 1)[0]
                if into is None:
                    yield position, view
                else:
                    into[position][:] = view
                    yield position, into[position]

    def _stream_remote(
        self, hashes: Sequence[BlockHash], into: list[memoryview] | None
    ) -> Iterator[tuple[int, memoryview]]:
        block_bytes = self.layout.block_bytes
        scratch = memoryview(bytearray(block_bytes)) if into is None else None

        def view_of(position: int) -> memoryview:
            if scratch is not None:
                return scratch
            assert into is not None
            return into[position]

        def place(blocks: wire.Blocks) -> list[memoryview]:
            if blocks.count > 1 or blocks.first >= len(hashes):
                raise RemoteProtocolError("the server sent other blocks than it was asked for")
            return [view_of(blocks.first)] if blocks.count else []

        num_hit = 0
        try:
            deadline = self._deadline(None, block_bytes)
            with self._endpoint.connection(deadline) as connection:
                request = wire.GetRequest(connection.space, _joined(hashes), 1)
                number = connection.send(request, deadline=deadline)
                for blocks in connection.receive_blocks(
                    number,
                    place,
                    _Verifier(self._digest_namespace(), hashes).taste,
                    lambda: self._deadline(None, block_bytes),
                ):
                    for position in range(blocks.first, blocks.first + blocks.count):
                        num_hit += 1
                        yield position, view_of(position)
        except TierError as error:
            self._endpoint.count_failure(error)
        finally:
            self.metrics.hit_blocks.labels(tier=self._label).inc(num_hit)
            self.metrics.missed_blocks.labels(tier=self._label).inc(len(hashes) - num_hit)

    # --- private: writing ------------------------------------------------------------------------------------------

    def _reserve_slots(
        self, number: int, hashes: Sequence[BlockHash], timeout_s: float | None
    ) -> tuple[Reservation, bytes]:
        """A reservation under `number`, and the id of the server that granted it."""
        deadline = self._deadline(timeout_s)
        try:
            with self._endpoint.connection(deadline) as connection:
                reserved = self._reserve(connection, number, hashes, deadline)
                arena = self._endpoint.arena_of(connection)
                offsets = self._offsets_in(arena, reserved.offsets)
                server_id = connection.welcome.server_id
        except (TierRefused, TierFull):
            raise
        except BaseException:  # an interrupt too: the server may have granted it
            self._close_later(number)
            raise

        def commit(first: int, count: int) -> int:
            return self._commit(number, first, count, server_id)

        reservation = Reservation(
            arena,
            offsets,
            self.layout.block_bytes,
            wire.unpack_numbers(reserved.positions),
            (reserved.num_ready, reserved.num_pending, reserved.num_refused),
            commit,
            lambda: self._end(wire.Close(number), server_id),
            lambda: self._endpoint.forget(lambda: self._end_now(wire.Close(number), server_id)),
        )
        return reservation, server_id

    def _set_local(
        self, hashes: Sequence[BlockHash], blocks: list[memoryview], deferred: bool, timeout_s: float | None
    ) -> list[int]:
        """Copy, then commit; by parts if the server has a disk, which writes the first while the next are copied."""
        number = self._endpoint.next_number()
        reservation, server_id = self._reserve_slots(number, hashes, timeout_s)
        wanted = [blocks[position] for position in reservation.positions]
        parts = self._parts_to_commit(len(wanted))
        try:
            if deferred:
                for part in parts:
                    reservation.fill(wanted[part], part.start, part.stop - part.start)
                    self._endpoint.do_later(functools.partial(self._commit_quietly, reservation, part))
            elif parts:
                self._fill_and_commit(number, reservation, server_id, wanted, parts)
        except BaseException:
            reservation.close()
            raise
        if deferred:
            self._endpoint.do_later(reservation.close)
        else:
            reservation.close()
        return list(reservation.positions)

    def _fill_and_commit(
        self,
        number: int,
        reservation: Reservation,
        server_id: bytes,
        blocks: Sequence[memoryview],
        parts: Sequence[slice],
    ) -> None:
        """The server hears of a part while the next is copied; its answers are read at the end."""
        reservation.fill(blocks[parts[0]], parts[0].start, parts[0].stop - parts[0].start)
        deadline = self._deadline(None, len(blocks) * self.layout.block_bytes)
        with self._endpoint.connection(deadline) as connection:
            if connection.welcome.server_id != server_id:
                raise TierRefused("the server that held this reservation is gone")
            sent = []
            for position, part in enumerate(parts):
                if position:
                    reservation.fill(blocks[part], part.start, part.stop - part.start)
                commit = wire.Commit(number, part.start, part.stop - part.start)
                sent.append(connection.send(commit, deadline=deadline))
            for request in sent:
                connection.receive(request, wire.Counted, deadline)

    def _commit_quietly(self, reservation: Reservation, part: slice) -> None:
        try:
            reservation.commit(part.start, part.stop - part.start)
        except TierError as error:  # nothing to try again: the slots go back when the reservation is closed
            self._endpoint.count_failure(error)

    def _parts_to_commit(self, count: int) -> list[slice]:
        """All at once, unless there is a disk: then small parts first, so that it begins at once, and larger ones."""
        parts: list[slice] = []
        if count and not self._endpoint.has_disk:
            return [slice(0, count)]
        first, nbytes = 0, _FIRST_PART_BYTES
        while first < count:
            end = min(count, first + max(1, nbytes // self.layout.block_bytes))
            parts.append(slice(first, end))
            first, nbytes = end, min(2 * nbytes, _PART_BYTES)
        return parts

    def _set_remote(
        self, hashes: Sequence[BlockHash], blocks: list[memoryview], deferred: bool, timeout_s: float | None
    ) -> list[int]:
        deadline = self._deadline(timeout_s, len(hashes) * self.layout.block_bytes)
        number = self._endpoint.next_number()
        try:
            with self._endpoint.connection(deadline) as connection:
                reserved = self._reserve(connection, number, hashes, deadline)
                server_id = connection.welcome.server_id
            positions = wire.unpack_numbers(reserved.positions)
            if not positions:
                return []
            wanted = [blocks[position] for position in positions]
            parts = self._parts(len(wanted))
            if len(parts) == 1:
                self._fill(number, wanted, slice(0, len(wanted)), deadline)
            else:
                self._transfers.map(lambda part: self._fill(number, wanted, part, deadline), parts)
        except (TierRefused, TierFull):
            raise
        except BaseException:  # an interrupt too: the server may have granted it
            self._close_later(number)
            raise
        end = wire.Close(number)
        if deferred:
            self._endpoint.do_later(lambda: self._end(end, server_id))
        else:
            self._end(end, server_id)
        return positions

    def _digest_namespace(self) -> Namespace:
        assert self._namespace is not None
        return self._namespace

    def _fill(self, number: int, blocks: Sequence[memoryview], part: slice, deadline: float) -> None:
        """Send `blocks[part]` into a reservation: all frames first, then their answers."""
        with self._endpoint.connection(deadline) as connection:
            frame_bytes = min(_FRAME_BYTES, connection.welcome.max_payload_bytes)
            step = max(1, frame_bytes // self.layout.block_bytes)
            sent = []
            for first in range(part.start, part.stop, step):
                payload = blocks[first : min(first + step, part.stop)]
                fill = wire.Fill(number, first, len(payload))
                sent.append(connection.send(fill, payload, deadline=deadline))
            for request in sent:
                connection.receive(request, wire.Counted, deadline)

    def _reserve(
        self, connection: Connection, number: int, hashes: Sequence[BlockHash], deadline: float
    ) -> wire.Reserved:
        request = wire.ReserveRequest(connection.space, _joined(hashes[:MAX_HASHES]), number)
        reserved = connection.call(request, wire.Reserved, deadline)
        if max(wire.unpack_numbers(reserved.positions), default=-1) >= len(hashes):
            raise RemoteProtocolError("the server reserved blocks that it was not asked for")
        if reserved.num_refused and not reserved.positions:
            raise TierFull(f"no room for {reserved.num_refused} blocks in {self.address}: {reserved.reason}")
        if reserved.num_refused:
            self.metrics.refused_blocks.labels(tier=self._label).inc(reserved.num_refused)
        return reserved

    def _offsets_in(self, arena: MappedArena | None, packed: bytes) -> list[int]:
        """The server's offsets, none of them outside its arena: what lies behind them is copied without a check."""
        offsets = wire.unpack_numbers(packed)
        if arena is not None and offsets and max(offsets) + self.layout.block_bytes > arena.nbytes:
            raise RemoteProtocolError("the server named blocks outside its arena")
        return offsets

    def _commit(self, number: int, first: int, count: int, server_id: bytes) -> int:
        deadline = self._deadline(None)
        with self._endpoint.connection(deadline) as connection:
            if connection.welcome.server_id != server_id:
                raise TierRefused("the server that held this reservation is gone")
            return connection.call(wire.Commit(number, first, count), wire.Counted, deadline).count

    # --- private: ending -------------------------------------------------------------------------------------------

    def _end(self, request: wire.Release | wire.Close, server_id: bytes) -> None:
        """End a lease or reservation now, or as soon as the server answers again."""
        try:
            self._end_now(request, server_id)
        except TierError:
            self._endpoint.do_later(lambda: self._end_now(request, server_id))

    def _end_now(self, request: wire.Release | wire.Close, server_id: bytes) -> None:
        deadline = self._deadline(None)
        with self._endpoint.connection(deadline) as connection:
            if connection.welcome.server_id == server_id:  # another server has no such lease
                connection.call(request, wire.Done, deadline)

    def _release_later(self, number: int) -> None:
        """End a lease whose reply never came: the server may have granted it."""
        self._endpoint.do_later(lambda: self._end_unknown(wire.Release(number)))

    def _close_later(self, number: int) -> None:
        self._endpoint.do_later(lambda: self._end_unknown(wire.Close(number)))

    def _end_unknown(self, request: wire.Release | wire.Close) -> None:
        deadline = self._deadline(None)
        with self._endpoint.connection(deadline) as connection:
            connection.call(request, wire.Done, deadline)

    # --- private: telling ------------------------------------------------------------------------------------------

    def _presence(self, namespace: Namespace, hashes: Sequence[BlockHash], deadline: float) -> list[int]:
        flags: list[int] = []
        for first in range(0, len(hashes), MAX_HASHES):
            part = hashes[first : first + MAX_HASHES]
            with self._endpoint.connection(deadline) as connection:
                reply = connection.call(wire.PresenceRequest(namespace, _joined(part)), wire.Contained, deadline)
            if len(reply.flags) != len(part):
                raise TierUnavailable("the server answered for other blocks than it was asked for")
            flags += reply.flags
        return flags

    def _send_note(self, request: wire.NoteRequest) -> None:
        self._note_places.release()
        deadline = self._deadline(None)
        try:
            with self._endpoint.connection(deadline) as connection:
                connection.call(request, wire.Done, deadline)
        except TierError as error:  # lost: nobody waits for it
            self._endpoint.count_failure(error)

    # --- private: small --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._layout is None:
            raise ConfigError("this client has no layout: pass layout= and namespace= to connect()")

    def _deadline(self, timeout_s: float | None, nbytes: int = 0) -> float:
        if timeout_s is not None:
            return time.monotonic() + timeout_s
        return time.monotonic() + self._options.timeout_s + nbytes / _SLOWEST_BYTES_PER_S

    def _parts(self, count: int) -> list[slice]:
        """`count` blocks in even, adjacent parts, one for each transfer connection."""
        num_parts = min(self._options.transfer_connections, count)
        bounds = [count * part // num_parts for part in range(num_parts + 1)]
        return [slice(start, end) for start, end in itertools.pairwise(bounds)]

    def _count(self, request: Callable[[int, bytes], wire.Request], hashes: Sequence[BlockHash]) -> int:
        self._check()
        deadline = self._deadline(None)
        total = 0
        for first in range(0, max(1, len(hashes)), MAX_HASHES):
            with self._endpoint.connection(deadline) as connection:
                message = request(connection.space, _joined(hashes[first : first + MAX_HASHES]))
                total += connection.call(message, wire.Counted, deadline).count
        return total

    def _document(self, request: wire.InfoRequest | wire.StatsRequest) -> dict[str, object]:
        deadline = self._deadline(None)
        with self._endpoint.connection(deadline) as connection:
            document = json.loads(connection.call(request, wire.Document, deadline).text)
        if not isinstance(document, dict):
            raise TierUnavailable("the server answered with something else than a document")
        return document


def _joined(hashes: Sequence[BlockHash]) -> bytes:
    try:
        if all(len(block_hash) == HASH_BYTES for block_hash in hashes):
            return join_hashes(hashes)
    except TypeError:
        pass
    raise ConfigError("block hashes are bytes of length 32, as `hashes()` makes them")


class _Verifier:
    """Checks blocks as they arrive over the network, piece by piece."""

    def __init__(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> None:
        self._namespace = namespace
        self._hashes = hashes
        self._position = 0
        self._digest: xxhash.xxh3_64 | None = None

    def taste(self, blocks: wire.Blocks, piece: memoryview, is_end: bool) -> None:
        """Raises `BlockCorrupt` unless what came is what was stored under its hash."""
        block_hash = self._hashes[self._position]
        if self._digest is None:
            self._digest = start_checksum(self._namespace, block_hash)
        self._digest.update(piece)
        if not is_end:
            return
        offset = 8 * (self._position - blocks.first)
        if self._digest.intdigest() != int.from_bytes(blocks.checksums[offset : offset + 8], "little"):
            raise BlockCorrupt(f"block {block_hash.hex()[:12]} arrived with other bytes than were stored")
        self._digest = None
        self._position += 1


def namespace_of(fields: Namespace | NamespaceFields | None, layout: KvLayout | None) -> Namespace | None:
    """The digest to use. Raises `ConfigError` where layout and namespace do not belong together."""
    if layout is None:
        if fields is not None:
            raise ConfigError("a namespace needs a layout: pass layout= too")
        return None
    if fields is None:
        raise ConfigError("blocks need a namespace: pass namespace=NamespaceFields(layout=..., weights=...)")
    if isinstance(fields, NamespaceFields):
        if fields.layout != layout:
            raise ConfigError("the namespace was made for another layout")
        return fields.digest()
    if len(fields) != 32:
        raise ConfigError(f"a namespace is a digest of 32 bytes, not {len(fields)}")
    return fields


def fields_text(fields: Namespace | NamespaceFields | None) -> str:
    """What to tell a server of a namespace: nothing where only its digest is known, or where it would be too much."""
    if not isinstance(fields, NamespaceFields):
        return ""
    text = json.dumps(fields.document(), separators=(",", ":"))
    return text if len(text) <= wire.MAX_FIELDS_CHARS else ""
