"""Carries out the requests of one connection: each message type has a method here, or in `admin_requests`.

The connection's thread calls everything. Block bytes go straight between the socket and the arena.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

from kvtier.blocks.block import Block
from kvtier.blocks.hashing import HASH_BYTES, BlockHash, split_hashes
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.namespace_document import read_fields
from kvtier.blocks.pool import Grant
from kvtier.cacheserver.admin_requests import AdminRequests
from kvtier.cacheserver.catalog import MAX_AT_ONCE
from kvtier.cacheserver.connection_context import ConnectionContext
from kvtier.cacheserver.namespaces import MemoryBlock, MemorySpace
from kvtier.cacheserver.pieces import in_pieces
from kvtier.cacheserver.served_client import Filling, ServedClient
from kvtier.cacheserver.traffic import Asking
from kvtier.errors import (
    RemoteProtocolError,
    TierFull,
    TierRefused,
)
from kvtier.memory.checksum import checksum_of
from kvtier.observe.printable import printable
from kvtier.transport.stream import Stream
from kvtier.wire import messages as wire
from kvtier.wire.frames import BufferList

_SCRATCH_BYTES = 1 << 20
_LOAD_S = 30.0
_MAX_SPACES = 1024
_MAX_NAME_CHARS = 256
_MAX_SUSPECTS = 64
_FEW_RESERVED = 4096
_PIECE_RESERVED = 1024


class ClientRequests:
    """Carries out the requests that `client` sends over `stream`. `close` ends this connection of the client.

    A message such as `MatchRequest` or `Release` is the operation "match" or "release", carried out by `on_match` or
    `on_release`.
    """

    def __init__(
        self,
        context: ConnectionContext,
        client: ServedClient,
        stream: Stream,
        *,
        may_write: bool = True,
        knows_places: bool = False,
        takes_declines: bool = False,
    ) -> None:
        """Replies tell a client that `knows_places` which blocks are in the server's cluster."""
        self._context = context
        self._knows_places = knows_places
        self._takes_declines = takes_declines
        self._may_write = may_write
        self._catalog = context.catalog
        self._client = client
        self._tenant = client.tenant
        self._admin = AdminRequests(context, client, self._space)
        self._stream = stream
        self._number = 0
        self._spaces: dict[int, MemorySpace] = {}
        self._client_namespaces: dict[int, Namespace] = {}
        self._filling: Filling | None = None
        self._last_place: wire.PlaceRequest | None = None
        self._note_traffic: Callable[[], None] | None = None
        """Records a request for the traffic statistics, after its reply is sent."""

    def answer(self, number: int, request: wire.Request) -> None:
        """Carry out request number `number` and send its reply."""
        started_at = time.perf_counter()
        self._number = number
        metrics = self._context.metrics
        operation, carry_out = _OPERATIONS[type(request)]
        try:
            if operation in _WRITES and not self._may_write:
                raise TierRefused(f"this token or certificate of the tenant {self._tenant.name} may only read")
            reply = carry_out(self, request)
        except (TierRefused, TierFull) as error:
            kind = "refused" if isinstance(error, TierRefused) else "full"
            metrics.refusals.labels(kind=kind).inc()
            reply = wire.Failure(kind, str(error))
        if reply is not None:
            self._stream.send(number, reply)
        metrics.requests.labels(operation=operation).inc()
        metrics.request_seconds.labels(operation=operation).observe(time.perf_counter() - started_at)
        if self._note_traffic is not None:
            note, self._note_traffic = self._note_traffic, None
            note()

    def place(self, message: wire.Fill, payload_bytes: int) -> BufferList:
        """The memory for a payload: the slots of its reservation, or scratch memory if that has ended."""
        try:
            filling = self._catalog.fill(self._client, message.reservation, message.first, message.count)
        except TierRefused as error:
            raise RemoteProtocolError(str(error)) from error
        self._context.metrics.received_bytes.inc(payload_bytes)
        if filling is None:
            scratch = memoryview(bytearray(min(_SCRATCH_BYTES, payload_bytes)))
            whole, rest = divmod(payload_bytes, len(scratch))
            return [scratch] * whole + [scratch[:rest]]
        self._filling = filling
        space = filling.space
        if payload_bytes != message.count * space.block_bytes:
            raise RemoteProtocolError(
                f"{payload_bytes} bytes cannot be {message.count} blocks of {space.block_bytes} bytes"
            )
        return [self._view(block, space) for block in filling.blocks]

    def close(self) -> None:
        if self._filling is not None:
            self._catalog.end_filling(self._filling, has_arrived=False)
        for space in self._spaces.values():
            self._catalog.close(space)
        self._catalog.leave(self._client)

    # --- namespaces ------------------------------------------------------------------------------------------------

    def on_open(self, request: wire.Open) -> wire.Opened:
        if request.block_bytes > self._context.config.max_payload_bytes:
            raise TierRefused(f"a block of {request.block_bytes} bytes exceeds this server's frame limit")
        if len(self._spaces) >= _MAX_SPACES:
            raise TierRefused(f"a connection may use at most {_MAX_SPACES} namespaces")
        if request.fields:
            read_fields(request.fields)
        space = self._catalog.open(
            Namespace(request.namespace),
            printable(request.name, _MAX_NAME_CHARS),
            request.block_bytes,
            request.block_tokens,
            request.fields,
            self._tenant,
            may_write=self._may_write,
        )
        self._client_namespaces[space.number] = Namespace(request.namespace)
        if space.number in self._spaces:
            self._catalog.close(space)
        self._spaces[space.number] = space
        return wire.Opened(space.number)

    def _space(self, number: int) -> MemorySpace:
        space = self._spaces.get(number)
        if space is None:
            raise TierRefused(f"namespace number {number} was not opened on this connection")
        return space

    # --- reading ---------------------------------------------------------------------------------------------------

    def on_match(self, request: wire.MatchRequest) -> wire.Matched:
        space = self._space(request.space)
        with self._split(request.hashes) as hashes:
            outcome = self._catalog.lease(self._client, request.lease, space, hashes, is_lazy=request.is_lazy)
            self._count_hits(len(outcome.blocks) + outcome.num_stored, len(hashes))
        # A client repeats a pending match, or computes the block; it may repeat one that met its limit, too.
        if outcome.ended is not MatchEnd.PENDING and not outcome.is_again:
            self._note_asked(space, request.hashes, Asking.LAZY_MATCH if request.is_lazy else Asking.MATCH)
        ended = wire.ENDING_WORDS[outcome.ended]
        if not outcome.num_shared or not self._knows_places:
            return wire.Matched(_offsets(outcome.blocks), ended, outcome.num_ready, outcome.num_stored)
        return wire.SharedMatch(
            _offsets(outcome.blocks), ended, outcome.num_ready, outcome.num_stored, outcome.num_shared
        )

    def on_await(self, request: wire.Await) -> wire.Counted:
        num_ready = self._catalog.await_lease(self._client, request.lease, request.count, _LOAD_S)
        if num_ready is None:
            raise TierRefused("the lease has ended")
        return wire.Counted(num_ready)

    def on_release(self, request: wire.Release) -> wire.Done:
        self._catalog.release(self._client, request.lease)
        return wire.Done()

    def on_get(self, request: wire.GetRequest) -> None:
        space = self._space(request.space)
        num_hashes = len(request.hashes) // HASH_BYTES
        frame_blocks = min(request.frame_blocks, self._context.config.max_payload_bytes // space.block_bytes)
        first = 0
        is_last = False
        self._note_asked(space, request.hashes, Asking.GET)
        while not is_last:
            wanted = split_hashes(request.hashes[first * HASH_BYTES : (first + MAX_AT_ONCE) * HASH_BYTES])
            blocks, is_all = self._catalog.borrow(space, wanted, frame_blocks, self._tenant)
            is_all = is_all and (len(blocks) < len(wanted) or first + len(wanted) == num_hashes)
            try:
                end = first + len(blocks)
                while True:
                    part = blocks[first - end :][:frame_blocks] if blocks else []
                    ready = part[: self._catalog.await_blocks(part, _LOAD_S)]
                    is_short = len(ready) < len(part)
                    is_last = is_short or (is_all and first + len(ready) == end)
                    # Count before sending: once a client has its last block, it may ask for the counts.
                    self._count_hits(len(ready), num_hashes - first if is_last else len(ready))
                    self._send_blocks(space, first, ready, is_last)
                    first += len(ready)
                    if is_short or first == end:
                        break
            finally:
                self._catalog.return_borrowed(blocks, self._tenant)

    def _send_blocks(self, space: MemorySpace, first: int, blocks: list[Block], is_last: bool) -> None:
        client_namespace = self._client_namespaces[space.number]
        payload = [self._view(block, space) for block in blocks]
        checksums = wire.pack_numbers(
            _checksum(client_namespace, space, block, view) for block, view in zip(blocks, payload, strict=True)
        )
        self._context.metrics.sent_bytes.inc(len(blocks) * space.block_bytes)
        self._stream.send(self._number, wire.Blocks(first, len(blocks), is_last, checksums), payload)
        self._spend(len(blocks) * space.block_bytes)

    def _spend(self, nbytes: int) -> None:
        """Wait until the tenant's bandwidth limit allows more."""
        wait_s = self._tenant.bandwidth.spend(nbytes)
        if wait_s:
            self._context.is_stopping.wait(wait_s)

    def on_contains(self, request: wire.ContainsRequest) -> wire.Contained:
        space = self._space(request.space)
        answers = in_pieces(self._context.bulk, lambda hashes: self._catalog.contains(space, hashes), request.hashes)
        return wire.Contained(b"".join(answers))

    def on_suspect(self, request: wire.SuspectRequest) -> wire.Counted:
        """Check blocks whose checksum failed at a client. Blocks altered in memory are dropped.

        For the others, the network is at fault.
        """
        space = self._space(request.space)
        num_altered = 0
        for block_hash in split_hashes(request.hashes[: _MAX_SUSPECTS * HASH_BYTES]):
            for block in self._catalog.borrow(space, [block_hash], tenant=self._tenant)[0]:
                try:
                    self._catalog.await_blocks([block], _LOAD_S)
                    assert isinstance(block, MemoryBlock)
                    found = checksum_of(space.namespace, block.hash, self._view(block, space))
                    is_altered = block.is_ready and block.checksum not in (None, found) and not space.is_table(block)
                finally:
                    self._catalog.return_borrowed([block], self._tenant)
                if is_altered:
                    num_altered += self._catalog.blocks.drop_altered([block])
        return wire.Counted(num_altered)

    def on_presence(self, request: wire.PresenceRequest) -> wire.Contained:
        namespace = Namespace(request.namespace)
        answers = in_pieces(
            self._context.bulk,
            lambda hashes: self._catalog.presence(namespace, hashes, self._tenant),
            request.hashes,
        )
        return wire.Contained(self._with_cluster(namespace, request.hashes, b"".join(answers)))

    def _with_cluster(self, namespace: Namespace, joined: bytes, flags: bytes) -> bytes:
        """Add to `flags` the blocks that only the cluster has.

        A client that has the namespace open asks often, for its own requests: the cluster is left out of these.
        """
        if not self._context.cluster.is_there or namespace in self._client_namespaces.values():
            return flags
        hashes = split_hashes(joined[: MAX_AT_ONCE * HASH_BYTES])
        asked = flags[: len(hashes)]
        return self._catalog.presence_elsewhere(namespace, hashes, asked, self._tenant) + flags[len(hashes) :]

    def on_place(self, request: wire.PlaceRequest) -> wire.Done:
        """Note a block's place in its prompt; ignored from a read-only client, which changes nothing for others.

        Never refused: the client has already sent its next request.
        """
        space = self._spaces.get(request.space)
        if self._may_write and space is not None:
            last, self._last_place = self._last_place, request
            is_next = last is not None and (last.space, last.position + 1) == (request.space, request.position)
            before = BlockHash(last.block) if last is not None and is_next else None
            block, head = BlockHash(request.block), BlockHash(request.head)
            self._context.cluster.place(space, block, head, request.position, before)
        return wire.Done()

    @contextlib.contextmanager
    def _split(self, joined: bytes) -> Iterator[list[BlockHash]]:
        """Split hashes into a list. Long lists cost memory and interpreter time, so only one exists at a time."""
        if len(joined) <= MAX_AT_ONCE * HASH_BYTES:
            yield split_hashes(joined)
            return
        with self._context.bulk:
            yield split_hashes(joined)

    # --- writing ---------------------------------------------------------------------------------------------------

    def on_reserve(self, request: wire.ReserveRequest) -> wire.Reserved:
        space = self._space(request.space)
        grant, reason = self._reserve(space, request.reservation, request.hashes)
        traffic = self._context.traffic
        self._note_traffic = functools.partial(traffic.note_stored, space, request.hashes)
        positions, offsets = wire.pack_numbers(grant.positions), _offsets(grant.blocks)
        return wire.Reserved(positions, offsets, grant.num_ready, grant.num_pending, grant.num_refused, reason)

    def _reserve(self, space: MemorySpace, number: int, joined: bytes) -> tuple[Grant, str]:
        """Reserve slots for all of the hashes under one number; many hashes in steps."""
        if len(joined) <= _FEW_RESERVED * HASH_BYTES:
            hashes = split_hashes(joined)
            return self._catalog.reserve(self._client, number, space, hashes, may_decline=self._takes_declines)
        total, reason, num_hashes = Grant([], [], 0, 0, 0), "", 0

        def reserve(hashes: list[BlockHash]) -> None:
            nonlocal total, reason, num_hashes
            grant, why = self._catalog.reserve(
                self._client,
                number,
                space,
                hashes,
                num_before=len(total.blocks),
                is_short=total.num_refused > 0,
                may_decline=self._takes_declines,
            )
            total = Grant(
                total.blocks + grant.blocks,
                total.positions + [num_hashes + position for position in grant.positions],
                total.num_ready + grant.num_ready,
                total.num_pending + grant.num_pending,
                total.num_refused + grant.num_refused,
            )
            reason = reason or why
            num_hashes += len(hashes)

        in_pieces(self._context.bulk, reserve, joined, few=0, step=_PIECE_RESERVED)
        if total.num_ready:  # so that the prompt's end is evicted before its beginning
            step = _PIECE_RESERVED * HASH_BYTES
            for first in reversed(range(0, len(joined), step)):
                self._catalog.touch(space, split_hashes(joined[first : first + step]))
        return total, reason

    def on_commit(self, request: wire.Commit) -> wire.Counted:
        if not self._client.is_local:  # a remote client cannot write there: the slot holds a former block's bytes
            raise TierRefused("only a client on this host can write in place; send a Fill")
        return self._committed(self._catalog.commit(self._client, request.reservation, request.first, request.count))

    def on_fill(self, request: wire.Fill) -> wire.Counted:
        filling, self._filling = self._filling, None
        if filling is None:
            return self._committed(None)
        committed = self._committed(self._catalog.end_filling(filling))
        self._spend(len(filling.blocks) * filling.space.block_bytes)
        return committed

    def _committed(self, num_committed: int | None) -> wire.Counted:
        if num_committed is None:
            raise TierRefused("the reservation has ended, or these of its blocks are already committed")
        self._context.metrics.stored_blocks.inc(num_committed)
        return wire.Counted(num_committed)

    def on_close(self, request: wire.Close) -> wire.Done:
        self._catalog.close_reservation(self._client, request.reservation)
        return wire.Done()

    # --- small -----------------------------------------------------------------------------------------------------

    def _note_asked(self, space: MemorySpace, hashes: bytes, asking: Asking) -> None:
        self._note_traffic = functools.partial(self._context.traffic.note_asked, space, hashes, asking)

    def _view(self, block: Block, space: MemorySpace) -> memoryview:
        return self._context.arena.view(block.start * SLOT_ALIGN_BYTES, space.block_bytes)

    def _count_hits(self, num_hit: int, num_asked: int) -> None:
        self._context.metrics.hit_blocks.inc(num_hit)
        self._context.metrics.missed_blocks.inc(num_asked - num_hit)


def _operation(kind: type[wire.Request]) -> tuple[str, Callable[[ClientRequests, Any], wire.Reply | None]]:
    name = kind.__name__.removesuffix("Request").lower()
    carry_out = getattr(ClientRequests, f"on_{name}", None)
    if carry_out is not None:
        return name, carry_out
    carry_out = getattr(AdminRequests, f"on_{name}")
    return name, lambda requests, request: carry_out(requests._admin, request)


_OPERATIONS = {kind: _operation(kind) for kind in get_args(wire.Request)}
"""For each type of message: its name in the metrics, and the method that carries it out."""

_WRITES = frozenset(("reserve", "commit", "fill", "close", "pin", "retain", "drop", "verify", "flush", "note"))
"""Operations refused to a client that may only read."""


def _checksum(client_namespace: Namespace, space: MemorySpace, block: Block, view: memoryview) -> int:
    """The block's checksum, computed at most once, on the first read at the latest; READY blocks do not change.

    It covers the client's own id of the namespace. For a tenant, the server's id differs.
    """
    assert isinstance(block, MemoryBlock)
    if client_namespace != space.namespace:
        if block.client_checksum is None:
            found = checksum_of(client_namespace, block.hash, view)
            if block.checksum not in (None, checksum_of(space.namespace, block.hash, view)):
                return found ^ 1  # the bytes were altered: the client notices and sends SuspectRequest
            block.client_checksum = found
        return block.client_checksum
    if block.checksum is None:
        block.checksum = checksum_of(space.namespace, block.hash, view)
    return block.checksum


def _offsets(blocks: list[Block]) -> bytes:
    return wire.pack_numbers(block.start * SLOT_ALIGN_BYTES for block in blocks)
