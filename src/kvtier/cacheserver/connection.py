"""One client connection: a thread that reads a request, carries it out, answers it, until the peer leaves.

Block bytes go straight between the socket and the arena. Whatever the peer sends, the worst that happens is that its
own connection ends.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from kvtier.blocks.hashing import join_hashes, split_hashes
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import Block
from kvtier.cacheserver.catalog import Catalog
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.namespace_descriptions import read_fields
from kvtier.cacheserver.namespaces import MemoryBlock, MemorySpace
from kvtier.cacheserver.notes import Notes
from kvtier.cacheserver.persistence import Disk
from kvtier.cacheserver.process_watch import ProcessWatch
from kvtier.cacheserver.served_client import ServedClient
from kvtier.errors import (
    KvtierError,
    RemoteProtocolError,
    TierError,
    TierFull,
    TierRefused,
    TierTimeout,
    TierUnavailable,
)
from kvtier.memory.checksum import checksum_of
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.metrics import ServerMetrics
from kvtier.transport.listening import peer_process
from kvtier.transport.stream import Stream
from kvtier.wire import messages as wire
from kvtier.wire.frames import HANDSHAKE_LIMITS, MAX_BODY_BYTES, BufferList, Frame, FrameLimits
from kvtier.wire.session import ServerSession

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_SCRATCH_BYTES = 1 << 20
_LOAD_S = 30.0
_LAST_WORDS_S = 0.5
_MAX_SPACES = 1024
_MAX_LISTED = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class ConnectionContext:
    """What every connection of one server shares."""

    config: CacheServerConfig
    catalog: Catalog
    disk: Disk
    arena: MappedArena
    watch: ProcessWatch
    metrics: ServerMetrics
    describe: Callable[[], dict[str, object]]
    count_up: Callable[[], dict[str, object]]
    server_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    notes: Notes = field(default_factory=Notes)
    is_stopping: threading.Event = field(default_factory=threading.Event)
    log: LogLimit = field(default_factory=lambda: LogLimit(logger))


class ClientRequests:
    """`client` asks over `stream`. With `close` one of its connections leaves.

    A message like `MatchRequest` or `Release` is the operation "match" or "release", and `on_match` or `on_release`
    carries it out.
    """

    def __init__(self, context: ConnectionContext, client: ServedClient, stream: Stream) -> None:
        self._context = context
        self._catalog = context.catalog
        self._client = client
        self._stream = stream
        self._number = 0
        self._spaces: dict[int, MemorySpace] = {}
        self._filling: tuple[MemorySpace, list[Block]] | None = None

    def answer(self, number: int, request: wire.Request) -> None:
        """Carry out the request that came under `number`, and reply to it."""
        started_at = time.perf_counter()
        self._number = number
        metrics = self._context.metrics
        operation, carry_out = _OPERATIONS[type(request)]
        try:
            reply = carry_out(self, request)
        except (TierRefused, TierFull) as error:
            kind = "refused" if isinstance(error, TierRefused) else "full"
            metrics.refusals.labels(kind=kind).inc()
            reply = wire.Failure(kind, str(error))
        if reply is not None:
            self._stream.send(number, reply)
        metrics.requests.labels(operation=operation).inc()
        metrics.request_seconds.labels(operation=operation).observe(time.perf_counter() - started_at)

    def place(self, message: wire.Fill, payload_bytes: int) -> BufferList:
        """Where a payload goes: the slots of the reservation it fills, or nowhere if that has ended."""
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
        space, blocks = filling
        if payload_bytes != message.count * space.block_bytes:
            raise RemoteProtocolError(
                f"{payload_bytes} bytes cannot be {message.count} blocks of {space.block_bytes} bytes"
            )
        return [self._view(block, space) for block in blocks]

    def close(self) -> None:
        if self._filling is not None:
            self._catalog.give_back(self._filling[1])
        for space in self._spaces.values():
            self._catalog.close(space)
        self._catalog.leave(self._client)

    # --- namespaces ------------------------------------------------------------------------------------------------

    def on_open(self, request: wire.Open) -> wire.Opened:
        if request.block_bytes > self._context.config.max_payload_bytes:
            raise TierRefused(f"a block of {request.block_bytes} bytes is over the frame limit of this server")
        if len(self._spaces) >= _MAX_SPACES:
            raise TierRefused(f"a connection may use at most {_MAX_SPACES} namespaces")
        if request.fields:
            read_fields(request.fields)
        space = self._catalog.open(
            Namespace(request.namespace), request.name, request.block_bytes, request.block_tokens, request.fields
        )
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
        hashes = split_hashes(request.hashes)
        space = self._space(request.space)
        outcome = self._catalog.lease(self._client, request.lease, space, hashes, is_lazy=request.is_lazy)
        self._count_hits(len(outcome.blocks) + outcome.num_stored, len(hashes))
        ended = wire.ENDING_WORDS[outcome.ended]
        return wire.Matched(_offsets(outcome.blocks), ended, outcome.num_ready, outcome.num_stored)

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
        hashes = split_hashes(request.hashes)
        blocks = self._catalog.borrow(space, hashes)
        self._count_hits(len(blocks), len(hashes))
        frame_blocks = min(request.frame_blocks, self._context.config.max_payload_bytes // space.block_bytes)
        try:
            first = 0
            is_last = False
            while not is_last:
                part = blocks[first : first + frame_blocks]
                ready = part[: self._catalog.await_blocks(part, _LOAD_S)]
                is_last = len(ready) < len(part) or first + frame_blocks >= len(blocks)
                payload = [self._view(block, space) for block in ready]
                checksums = wire.pack_numbers(
                    _checksum(space, block, view) for block, view in zip(ready, payload, strict=True)
                )
                self._stream.send(self._number, wire.Blocks(first, len(ready), is_last, checksums), payload)
                first += len(ready)
        finally:
            self._catalog.give_back(blocks)
        self._context.metrics.sent_bytes.inc(first * space.block_bytes)

    def on_contains(self, request: wire.ContainsRequest) -> wire.Contained:
        return wire.Contained(self._catalog.contains(self._space(request.space), split_hashes(request.hashes)))

    def on_presence(self, request: wire.PresenceRequest) -> wire.Contained:
        return wire.Contained(self._catalog.presence(Namespace(request.namespace), split_hashes(request.hashes)))

    # --- writing ---------------------------------------------------------------------------------------------------

    def on_reserve(self, request: wire.ReserveRequest) -> wire.Reserved:
        hashes = split_hashes(request.hashes)
        grant, reason = self._catalog.reserve(self._client, request.reservation, self._space(request.space), hashes)
        positions, offsets = wire.pack_numbers(grant.positions), _offsets(grant.blocks)
        return wire.Reserved(positions, offsets, grant.num_ready, grant.num_pending, grant.num_refused, reason)

    def on_commit(self, request: wire.Commit) -> wire.Counted:
        if not self._client.is_local:  # it has written nothing there: the slot holds somebody's old bytes
            raise TierRefused("only a client on this host can write in place; send a Fill")
        return self._committed(self._catalog.commit(self._client, request.reservation, request.first, request.count))

    def on_fill(self, request: wire.Fill) -> wire.Counted:
        filling, self._filling = self._filling, None
        return self._committed(None if filling is None else self._catalog.commit_filled(*filling))

    def _committed(self, num_committed: int | None) -> wire.Counted:
        if num_committed is None:
            raise TierRefused("the reservation has ended, or these blocks of it are committed")
        self._context.metrics.stored_blocks.inc(num_committed)
        return wire.Counted(num_committed)

    def on_close(self, request: wire.Close) -> wire.Done:
        self._catalog.close_reservation(self._client, request.reservation)
        return wire.Done()

    # --- administration --------------------------------------------------------------------------------------------

    def on_pin(self, request: wire.PinRequest) -> wire.Counted:
        act = self._catalog.pin if request.keep else self._catalog.unpin
        return wire.Counted(act(self._space(request.space), split_hashes(request.hashes)))

    def on_drop(self, request: wire.DropRequest) -> wire.Counted:
        return wire.Counted(self._catalog.drop(self._space(request.space), split_hashes(request.hashes)))

    def on_list(self, request: wire.ListRequest) -> wire.Listed:
        hashes, flags, is_last = self._catalog.list_blocks(self._space(request.space), request.first, _MAX_LISTED)
        return wire.Listed(join_hashes(hashes), flags, 0 if is_last else request.first + _MAX_LISTED)

    def on_verify(self, request: wire.VerifyRequest) -> wire.Contained:
        space = self._space(request.space)
        try:
            return wire.Contained(bytes(self._context.disk.verify(space, split_hashes(request.hashes))))
        except TierUnavailable as error:
            raise TierRefused(str(error)) from error

    def on_flush(self, request: wire.Flush) -> wire.Done:
        """When it is answered, what was committed before is on disk, if there is one."""
        try:
            self._context.disk.flush(self._context.config.flush_timeout_s)
        except (TierTimeout, TierUnavailable) as error:
            raise TierRefused(str(error)) from error
        return wire.Done()

    def on_note(self, request: wire.NoteRequest) -> wire.Done:
        self._context.notes.put(request.request_id, request.text)
        return wire.Done()

    def on_noted(self, request: wire.NotedRequest) -> wire.Document:
        return wire.Document(self._context.notes.get(request.request_id))

    def on_info(self, request: wire.InfoRequest) -> wire.Document:
        return wire.Document(json.dumps(self._context.describe()))

    def on_stats(self, request: wire.StatsRequest) -> wire.Document:
        return wire.Document(json.dumps(self._context.count_up()))

    def on_ping(self, request: wire.Ping) -> wire.Done:
        return wire.Done()

    def on_bye(self, request: wire.Bye) -> wire.Done:
        self._catalog.end(self._client)
        return wire.Done()

    # --- small -----------------------------------------------------------------------------------------------------

    def _view(self, block: Block, space: MemorySpace) -> memoryview:
        return self._context.arena.view(block.start * SLOT_ALIGN_BYTES, space.block_bytes)

    def _count_hits(self, num_hit: int, num_asked: int) -> None:
        self._context.metrics.hit_blocks.inc(num_hit)
        self._context.metrics.missed_blocks.inc(num_asked - num_hit)


_OPERATIONS: dict[type[wire.Request], tuple[str, Callable[[ClientRequests, Any], wire.Reply | None]]] = {
    kind: (name, getattr(ClientRequests, f"on_{name}"))
    for kind in get_args(wire.Request)
    for name in [kind.__name__.removesuffix("Request").lower()]
}
"""By message: its name in the metrics, and the method that carries it out."""


def _checksum(space: MemorySpace, block: Block, view: memoryview) -> int:
    """Computed once, when the block is first read; READY blocks do not change."""
    assert isinstance(block, MemoryBlock)
    if block.checksum is None:
        block.checksum = checksum_of(space.namespace, block.hash, view)
    return block.checksum


def _offsets(blocks: list[Block]) -> bytes:
    return wire.pack_numbers(block.start * SLOT_ALIGN_BYTES for block in blocks)


class ServedConnection:
    """Owns its socket and its thread. `on_end` is called from that thread when it is over."""

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
        context: ConnectionContext,
        on_end: Callable[[ServedConnection], None],
    ) -> None:
        self._context = context
        self._is_unix = sock.family == socket.AF_UNIX
        self._on_end = on_end
        # TLS takes several messages: they are exchanged later, in the connection's own thread.
        self._sock = sock if tls is None else tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._stream = Stream(self._sock, self._place, _swallow, HANDSHAKE_LIMITS)
        self._requests: ClientRequests | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-connection", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def refuse(self, sentence: str) -> None:
        """End it with a sentence, before it began."""
        if not isinstance(self._sock, ssl.SSLSocket):  # that one would have to be let in first
            self._say_last(wire.Failure("refused", sentence))
        self._stream.close()

    def stop_receiving(self) -> None:
        """Take no more requests; the one under way is answered."""
        self._stream.stop_receiving()

    def shut_down(self) -> None:
        self._stream.shut_down()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            session, requests = self._shake_hands()
            self._stream.set_timeout(self._context.config.stall_timeout_s)
            while not self._context.is_stopping.is_set():
                frame = self._next_frame()
                if frame is None:
                    break
                requests.answer(frame.request, session.request(frame.message))
        except TierError as error:
            logger.debug("connection ended: %s", error)
        except RemoteProtocolError as error:
            self._context.metrics.refusals.labels(kind="protocol").inc()
            self._context.log.warning("protocol", "connection closed: %s", error)
            self._say_last(wire.Failure("protocol", str(error)))
        except Exception:
            logger.exception("connection closed by a bug of ours")
        finally:
            self._end()

    def _shake_hands(self) -> tuple[ServerSession, ClientRequests]:
        context = self._context
        config = context.config
        arena_bytes = context.arena.nbytes if self._is_unix else 0
        session = ServerSession(
            wire.Welcome(
                "kvtier", context.server_id, b"", arena_bytes, config.max_payload_bytes, config.folder is not None
            ),
            None if self._is_unix else config.token,
            FrameLimits(MAX_BODY_BYTES, config.max_payload_bytes),
        )
        deadline = time.monotonic() + _HANDSHAKE_S
        self._stream.start_tls(_HANDSHAKE_S)
        try:
            while not session.is_open:
                frame = self._stream.receive(deadline)
                answer = session.shake(frame.message)
                if not session.is_open:
                    self._stream.send(frame.request, answer, deadline=deadline)
            assert session.hello is not None
            requests = self._join(session.hello)
        except TierRefused as error:
            context.metrics.refusals.labels(kind="refused").inc()
            context.log.warning("refused", "client refused: %s", error)
            self._say_last(wire.Failure("refused", str(error)))
            raise
        self._stream.set_limits(session.limits)
        pass_fd = context.arena.fd if self._is_unix else None
        self._stream.send(frame.request, answer, deadline=deadline, pass_fd=pass_fd)
        return session, requests

    def _join(self, hello: wire.Hello) -> ClientRequests:
        context = self._context
        pid, pidfd = peer_process(self._sock) if self._is_unix else (None, None)
        try:
            client = context.catalog.join(hello.holder, pid)
        except TierRefused:
            if pidfd is not None:
                socket.close(pidfd)
            raise
        self._requests = ClientRequests(context, client, self._stream)
        if pidfd is not None:
            context.watch.watch(client, pidfd)
        return self._requests

    def _next_frame(self) -> Frame[wire.Message] | None:
        """The next request; None when the peer left between two of them."""
        while True:
            try:
                return self._stream.receive()
            except TierTimeout:
                if not self._stream.is_between_frames:
                    raise  # stalled in the middle of a frame
            except TierError:
                if self._stream.is_between_frames:
                    return None
                raise

    def _place(self, number: int, message: wire.Message, payload_bytes: int) -> BufferList:
        if not isinstance(message, wire.Fill):
            raise RemoteProtocolError(f"{type(message).__name__} carries no payload")
        assert self._requests is not None
        return self._requests.place(message, payload_bytes)

    def _say_last(self, failure: wire.Failure) -> None:
        try:
            self._stream.send(0, failure, deadline=time.monotonic() + _LAST_WORDS_S)
            self._stream.drain(_LAST_WORDS_S)
        except KvtierError:
            pass  # the peer does not listen any more

    def _end(self) -> None:
        if self._requests is not None:
            self._requests.close()
        self._stream.shut_down()
        self._stream.close()
        self._on_end(self)


def _swallow(piece: memoryview, is_end: bool) -> None:
    """What arrives for a slot is summed when it is first read."""
