"""One client connection: a thread that reads a request, carries it out, answers it, until the peer leaves.

Block bytes go straight between the socket and the arena. Whatever the peer sends, the worst that happens is that its
own connection ends.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable

from kvtier.blocks.hashing import BlockHash, join_hashes, split_hashes
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import Block
from kvtier.cacheserver.catalog import Catalog, Holder, Space
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.namespace_descriptions import read_fields
from kvtier.cacheserver.notes import Notes
from kvtier.cacheserver.persistence import MemoryBlock
from kvtier.cacheserver.process_watch import ProcessWatch
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


class Services:
    """What every connection of one server shares."""

    def __init__(
        self,
        config: CacheServerConfig,
        catalog: Catalog,
        arena: MappedArena,
        watch: ProcessWatch,
        metrics: ServerMetrics,
        server_id: bytes,
        describe: Callable[[], dict[str, object]],
        count_up: Callable[[], dict[str, object]],
    ) -> None:
        self.config = config
        self.catalog = catalog
        self.arena = arena
        self.watch = watch
        self.metrics = metrics
        self.server_id = server_id
        self.describe = describe
        self.count_up = count_up
        self.notes = Notes()
        self.is_stopping = threading.Event()
        self.log = LogLimit(logger)


class Connection:
    """Owns its socket and its thread. `on_end` is called from that thread when it is over."""

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
        services: Services,
        on_end: Callable[[Connection], None],
    ) -> None:
        self._services = services
        self._is_unix = sock.family == socket.AF_UNIX
        self._on_end = on_end
        # TLS takes several messages: they are exchanged later, in the connection's own thread.
        self._sock = sock if tls is None else tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._stream = Stream(self._sock, self._place, _swallow, HANDSHAKE_LIMITS)
        self._holder: Holder | None = None
        self._spaces: dict[int, Space] = {}
        self._filling: tuple[Space, list[Block]] | None = None
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
            self._shake_hands()
            self._stream.set_timeout(self._services.config.stall_timeout_s)
            while not self._services.is_stopping.is_set():
                frame = self._next_frame()
                if frame is None:
                    break
                self._answer(frame)
        except TierError as error:
            logger.debug("connection ended: %s", error)
        except RemoteProtocolError as error:
            self._services.metrics.refusals.labels(kind="protocol").inc()
            self._services.log.warning("protocol", "connection closed: %s", error)
            self._say_last(wire.Failure("protocol", str(error)))
        except Exception:
            logger.exception("connection closed by a bug of ours")
        finally:
            self._end()

    def _shake_hands(self) -> None:
        services = self._services
        config = services.config
        arena_bytes = services.arena.nbytes if self._is_unix else 0
        session = ServerSession(
            wire.Welcome(
                "kvtier", services.server_id, b"", arena_bytes, config.max_payload_bytes, config.folder is not None
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
            self._join(session.hello)
        except TierRefused as error:
            services.metrics.refusals.labels(kind="refused").inc()
            services.log.warning("refused", "client refused: %s", error)
            self._say_last(wire.Failure("refused", str(error)))
            raise
        self._stream.set_limits(session.limits)
        pass_fd = services.arena.fd if self._is_unix else None
        self._stream.send(frame.request, answer, deadline=deadline, pass_fd=pass_fd)
        self._session = session

    def _join(self, hello: wire.Hello) -> None:
        services = self._services
        if not self._is_unix:
            self._holder = services.catalog.join(hello.holder, None)
            return
        pid, pidfd = peer_process(self._sock)
        try:
            self._holder = services.catalog.join(hello.holder, pid)
        except TierRefused:
            socket.close(pidfd)
            raise
        services.watch.watch(self._holder, pidfd)

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

    def _answer(self, frame: Frame[wire.Message]) -> None:
        started_at = time.perf_counter()
        request = self._session.request(frame.message)
        metrics = self._services.metrics
        operation = _OPERATIONS[type(request)]
        try:
            reply = self._carry_out(frame.request, request)
        except TierRefused as error:
            reply = self._refuse("refused", str(error))
        except TierFull as error:
            reply = self._refuse("full", str(error))
        if reply is not None:
            self._stream.send(frame.request, reply)
        metrics.requests.labels(operation=operation).inc()
        metrics.request_seconds.labels(operation=operation).observe(time.perf_counter() - started_at)

    def _refuse(self, kind: str, sentence: str) -> wire.Failure:
        self._services.metrics.refusals.labels(kind=kind).inc()
        return wire.Failure(kind, sentence)

    def _carry_out(self, number: int, request: wire.Request) -> wire.Reply | None:
        services = self._services
        catalog = services.catalog
        holder = self._holder
        assert holder is not None
        match request:
            case wire.MatchRequest():
                return self._match(holder, request)
            case wire.Release():
                catalog.release(holder, request.lease)
                return wire.Done()
            case wire.ReserveRequest():
                return self._reserve(holder, request)
            case wire.Commit():
                if not holder.is_local:  # it has written nothing there: the slot holds somebody's old bytes
                    raise TierRefused("only a client on this host can write in place; send a Fill")
                committed = catalog.commit(holder, request.reservation, request.first, request.count)
                return self._counted(committed)
            case wire.Fill():
                filling, self._filling = self._filling, None
                return self._counted(None if filling is None else catalog.commit_filled(*filling))
            case wire.Await():
                num_ready = catalog.await_lease(holder, request.lease, request.count, _LOAD_S)
                if num_ready is None:
                    raise TierRefused("the lease has ended")
                return wire.Counted(num_ready)
            case wire.Close():
                catalog.close_reservation(holder, request.reservation)
                return wire.Done()
            case wire.GetRequest():
                self._send_blocks(number, request)
                return None
            case wire.ContainsRequest():
                return wire.Contained(catalog.contains(self._space(request.space), split_hashes(request.hashes)))
            case wire.PinRequest():
                act = catalog.pin if request.keep else catalog.unpin
                return wire.Counted(act(self._space(request.space), split_hashes(request.hashes)))
            case wire.DropRequest():
                return wire.Counted(catalog.drop(self._space(request.space), split_hashes(request.hashes)))
            case wire.ListRequest():
                hashes, flags, is_last = catalog.list_blocks(self._space(request.space), request.first, _MAX_LISTED)
                return wire.Listed(join_hashes(hashes), flags, 0 if is_last else request.first + _MAX_LISTED)
            case wire.VerifyRequest():
                return wire.Contained(catalog.verify(self._space(request.space), split_hashes(request.hashes)))
            case wire.PresenceRequest():
                return wire.Contained(catalog.presence(Namespace(request.namespace), split_hashes(request.hashes)))
            case wire.NoteRequest():
                services.notes.put(request.request_id, request.text)
                return wire.Done()
            case wire.NotedRequest():
                return wire.Document(services.notes.get(request.request_id))
            case wire.Open():
                return self._open(request)
            case wire.InfoRequest():
                return wire.Document(json.dumps(services.describe()))
            case wire.StatsRequest():
                return wire.Document(json.dumps(services.count_up()))
            case wire.Flush():
                self._flush()
                return wire.Done()
            case wire.Ping():
                return wire.Done()
            case wire.Bye():
                catalog.end(holder)
                return wire.Done()

    def _open(self, request: wire.Open) -> wire.Opened:
        if request.block_bytes > self._services.config.max_payload_bytes:
            raise TierRefused(f"a block of {request.block_bytes} bytes is over the frame limit of this server")
        if len(self._spaces) >= _MAX_SPACES:
            raise TierRefused(f"a connection may use at most {_MAX_SPACES} namespaces")
        if request.fields:
            read_fields(request.fields)
        space = self._services.catalog.open(
            Namespace(request.namespace), request.name, request.block_bytes, request.block_tokens, request.fields
        )
        if space.number in self._spaces:
            self._services.catalog.close(space)
        self._spaces[space.number] = space
        return wire.Opened(space.number)

    def _space(self, number: int) -> Space:
        space = self._spaces.get(number)
        if space is None:
            raise TierRefused(f"namespace number {number} was not opened on this connection")
        return space

    def _match(self, holder: Holder, request: wire.MatchRequest) -> wire.Matched:
        hashes = split_hashes(request.hashes)
        space = self._space(request.space)
        outcome = self._services.catalog.lease(holder, request.lease, space, hashes, is_lazy=request.is_lazy)
        self._count_hits(len(outcome.blocks) + outcome.num_stored, len(hashes))
        return wire.Matched(
            _offsets(outcome.blocks), wire.ENDING_WORDS[outcome.ended], outcome.num_ready, outcome.num_stored
        )

    def _reserve(self, holder: Holder, request: wire.ReserveRequest) -> wire.Reserved:
        grant, reason = self._services.catalog.reserve(
            holder, request.reservation, self._space(request.space), split_hashes(request.hashes)
        )
        return wire.Reserved(
            wire.pack_numbers(grant.positions),
            _offsets(grant.blocks),
            grant.num_ready,
            grant.num_pending,
            grant.num_refused,
            reason,
        )

    def _counted(self, num_committed: int | None) -> wire.Counted:
        if num_committed is None:
            raise TierRefused("the reservation has ended, or these blocks of it are committed")
        self._services.metrics.stored_blocks.inc(num_committed)
        return wire.Counted(num_committed)

    def _send_blocks(self, number: int, request: wire.GetRequest) -> None:
        services = self._services
        space = self._space(request.space)
        hashes: list[BlockHash] = split_hashes(request.hashes)
        blocks = services.catalog.borrow(space, hashes)
        self._count_hits(len(blocks), len(hashes))
        frame_blocks = min(request.frame_blocks, services.config.max_payload_bytes // space.block_bytes)
        try:
            first = 0
            is_last = False
            while not is_last:
                part = blocks[first : first + frame_blocks]
                ready = part[: services.catalog.await_blocks(part, _LOAD_S)]
                is_last = len(ready) < len(part) or first + frame_blocks >= len(blocks)
                payload = [self._view(block, space) for block in ready]
                checksums = wire.pack_numbers(
                    self._checksum(space, block, view) for block, view in zip(ready, payload, strict=True)
                )
                self._stream.send(number, wire.Blocks(first, len(ready), is_last, checksums), payload)
                first += len(ready)
        finally:
            services.catalog.give_back(blocks)
        services.metrics.sent_bytes.inc(first * space.block_bytes)

    def _checksum(self, space: Space, block: Block, view: memoryview) -> int:
        """Computed once, when the block is first read; READY blocks do not change."""
        assert isinstance(block, MemoryBlock)
        if block.checksum is None:
            block.checksum = checksum_of(space.namespace, block.hash, view)
        return block.checksum

    def _flush(self) -> None:
        try:
            self._services.catalog.flush(self._services.config.flush_timeout_s)
        except (TierTimeout, TierUnavailable) as error:
            raise TierRefused(str(error)) from error

    def _place(self, number: int, message: wire.Message, payload_bytes: int) -> BufferList:
        """Where a payload goes: the slots of the reservation it fills, or nowhere if that has ended."""
        if not isinstance(message, wire.Fill):
            raise RemoteProtocolError(f"{type(message).__name__} carries no payload")
        assert self._holder is not None
        try:
            filling = self._services.catalog.fill(self._holder, message.reservation, message.first, message.count)
        except TierRefused as error:
            raise RemoteProtocolError(str(error)) from error
        self._services.metrics.received_bytes.inc(payload_bytes)
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

    def _view(self, block: Block, space: Space) -> memoryview:
        return self._services.arena.view(block.start * SLOT_ALIGN_BYTES, space.block_bytes)

    def _count_hits(self, num_hit: int, num_asked: int) -> None:
        self._services.metrics.hit_blocks.inc(num_hit)
        self._services.metrics.missed_blocks.inc(num_asked - num_hit)

    def _say_last(self, failure: wire.Failure) -> None:
        try:
            self._stream.send(0, failure, deadline=time.monotonic() + _LAST_WORDS_S)
            self._stream.drain(_LAST_WORDS_S)
        except KvtierError:
            pass  # the peer does not listen any more

    def _end(self) -> None:
        catalog = self._services.catalog
        if self._filling is not None:
            catalog.give_back(self._filling[1])
        for space in self._spaces.values():
            catalog.close(space)
        if self._holder is not None:
            catalog.leave(self._holder)
        self._stream.shut_down()
        self._stream.close()
        self._on_end(self)


_OPERATIONS = {
    wire.Open: "open",
    wire.MatchRequest: "match",
    wire.ReserveRequest: "reserve",
    wire.GetRequest: "get",
    wire.ContainsRequest: "contains",
    wire.PinRequest: "pin",
    wire.DropRequest: "drop",
    wire.ListRequest: "list",
    wire.VerifyRequest: "verify",
    wire.PresenceRequest: "presence",
    wire.NoteRequest: "note",
    wire.NotedRequest: "noted",
    wire.Release: "release",
    wire.Fill: "fill",
    wire.Commit: "commit",
    wire.Close: "close",
    wire.Await: "await",
    wire.Flush: "flush",
    wire.InfoRequest: "info",
    wire.StatsRequest: "stats",
    wire.Ping: "ping",
    wire.Bye: "bye",
}


def _swallow(piece: memoryview, is_end: bool) -> None:
    """What arrives for a slot is summed when it is first read."""


def _offsets(blocks: list[Block]) -> bytes:
    return wire.pack_numbers(block.start * SLOT_ALIGN_BYTES for block in blocks)
