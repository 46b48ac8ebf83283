"""One connection to one cache server: handshake, requests, replies. Used by one thread at a time."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.blocks.hashing import HASH_BYTES, BlockHash, join_hashes
from kvtier.errors import ConfigError, RemoteProtocolError, TierFull, TierRefused, TierTimeout, TierUnavailable
from kvtier.transport.address import Address, UnixAddress
from kvtier.transport.listening import peer_user
from kvtier.transport.stream import Stream
from kvtier.wire import messages as wire
from kvtier.wire.frames import HANDSHAKE_LIMITS, MAX_BODY_BYTES, BufferList, FrameLimits
from kvtier.wire.session import DECLINES, PLACES, RETENTION, ClientSession, can_retain, segment_blocks_of

_Reply = TypeVar("_Reply", bound=wire.Reply)
Place = Callable[[wire.Blocks], BufferList]
Taste = Callable[[wire.Blocks, memoryview, bool], None]


@dataclass(frozen=True, slots=True)
class Keys:
    """Access to a server over TCP: a token, a secret to encrypt with, or TLS."""

    token: bytes | None = None
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None


NO_KEYS = Keys()
"""For a process on the server's host, which needs none."""


class ServerConnection:
    """Open once constructed. After any error on it, it must be closed."""

    def __init__(
        self, address: Address, holder: bytes, deadline: float, keys: Keys = NO_KEYS, *, takes_declines: bool = False
    ) -> None:
        self._requests = 0
        self._place: Place | None = None
        self._taste: Taste | None = None
        self._arriving: wire.Blocks | None = None
        sock = _connect(address, keys.tls, deadline)
        self._stream = Stream(sock, self._place_payload, HANDSHAKE_LIMITS, self._taste_piece)
        try:
            name = f"kvtier pid={os.getpid()}{DECLINES if takes_declines else ''}{RETENTION}{PLACES}"
            self.welcome = self._shake_hands(ClientSession(name, holder, keys.token, keys.secret), deadline)
        except BaseException:
            self._stream.close()
            raise
        self.space = 0
        self.can_retain = can_retain(self.welcome)
        self.segment_blocks = segment_blocks_of(self.welcome)
        """How many blocks of a prompt the server keeps in one place; 0 if it does not want blocks' places."""

    def take_arena_fd(self) -> int:
        """The arena's descriptor that came with the welcome; the caller now owns it."""
        if len(self._stream.passed_fds) != 1:
            raise RemoteProtocolError("the server passed no arena")
        return self._stream.passed_fds.pop()

    def call(
        self,
        request: wire.Request,
        reply_type: type[_Reply],
        deadline: float,
        *,
        after: Sequence[wire.PlaceRequest] = (),
    ) -> _Reply:
        """Send a request and wait for its reply. Raises the error of a `Failure`; the connection is then still usable.

        `after` is sent just before it.
        """
        said = [self.send(place, deadline=deadline) for place in after]
        number = self.send(request, deadline=deadline)
        for each in said:
            self.receive(each, wire.Done, deadline)
        return self.receive(number, reply_type, deadline)

    def send(self, request: wire.Request, payload: Sequence[memoryview] = (), *, deadline: float) -> int:
        self._requests = self._requests % 0xFFFF_FFFF + 1
        self._stream.send(self._requests, request, payload, deadline)
        return self._requests

    def receive(self, number: int, reply_type: type[_Reply], deadline: float) -> _Reply:
        frame = self._stream.receive(deadline)
        message = frame.message
        if isinstance(message, wire.Failure):
            if message.kind == "refused":
                raise TierRefused(f"the cache server refused: {message.sentence}")
            if message.kind == "full":
                raise TierFull(f"the cache server is full: {message.sentence}")
            raise RemoteProtocolError(f"the cache server gave up on this connection: {message.sentence}")
        if frame.request != number or not isinstance(message, reply_type):
            raise RemoteProtocolError(f"{type(message).__name__} does not answer the request")
        return message

    def get_blocks(
        self, request: wire.GetRequest, place: Place, taste: Taste, deadline: Callable[[], float]
    ) -> Iterator[wire.Blocks]:
        """Send `request`; then yield the frames that answer it, each after its payload is where `place` said.

        `taste` is called with each piece of a payload as it arrives, and with whether it ends a block. `deadline` is
        called again for each, so that a slow consumer does not look like a slow server.
        """
        number = self.send(request, deadline=deadline())
        self._place, self._taste = place, taste
        try:
            next_block = 0
            while True:
                blocks = self.receive(number, wire.Blocks, deadline())
                if blocks.first != next_block:
                    raise RemoteProtocolError("blocks arrived out of order")
                next_block += blocks.count
                yield blocks
                if blocks.is_last:
                    return
        finally:
            self._place = self._taste = None

    def has_ended(self) -> bool:
        """The server has left, or sent an unsolicited message."""
        return self._stream.is_readable()

    def close(self) -> None:
        self._stream.close()

    def _shake_hands(self, session: ClientSession, deadline: float) -> wire.Welcome:
        self._stream.send(0, session.hello, deadline=deadline)
        while True:
            frame = self._stream.receive(deadline, takes_fds=True)
            answer = session.shake(frame.message)
            if answer is None:
                break
            self._stream.send(0, answer, deadline=deadline)
        assert session.welcome is not None
        if session.seals is not None:
            self._stream.encrypt(session.seals)
        self._stream.set_limits(FrameLimits(MAX_BODY_BYTES, session.welcome.max_payload_bytes))
        return session.welcome

    def _place_payload(self, number: int, message: wire.Message, payload_bytes: int) -> BufferList:
        if not isinstance(message, wire.Blocks) or self._place is None or number != self._requests:
            raise RemoteProtocolError("the server sent a payload that was not requested")
        views = self._place(message)
        if sum(map(len, views)) != payload_bytes:
            raise RemoteProtocolError(f"the server sent {payload_bytes} bytes for {message.count} blocks")
        self._arriving = message
        return views

    def _taste_piece(self, piece: memoryview, is_end: bool) -> None:
        if self._taste is not None and self._arriving is not None:
            self._taste(self._arriving, piece, is_end)


def joined(hashes: Sequence[BlockHash]) -> bytes:
    """Hashes as requests carry them. Raises `ConfigError` for anything else."""
    try:
        if all(len(block_hash) == HASH_BYTES for block_hash in hashes):
            return join_hashes(hashes)
    except TypeError:
        pass
    raise ConfigError("block hashes are bytes of length 32, as `hashes()` makes them")


def _check_owner(sock: socket.socket, address: UnixAddress) -> None:
    """Another user's server may have anything in its memory. Raises `TierRefused`."""
    owner = peer_user(sock)
    if owner not in (os.geteuid(), 0):
        raise TierRefused(f"{address} is served by another user ({owner}), who is not trusted with this one's blocks")


def _connect(address: Address, tls: ssl.SSLContext | None, deadline: float) -> socket.socket:
    timeout_s = deadline - time.monotonic()
    if timeout_s <= 0:
        raise TierTimeout(f"no connection to {address} within the deadline")
    try:
        if isinstance(address, UnixAddress):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            sock = socket.create_connection((address.host, address.port), timeout_s)
        try:
            if isinstance(address, UnixAddress):
                sock.settimeout(timeout_s)
                sock.connect(address.path)
                _check_owner(sock, address)
                return sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock if tls is None else tls.wrap_socket(sock, server_hostname=address.host)
        except BaseException:
            sock.close()
            raise
    except TimeoutError as error:
        raise TierTimeout(f"no connection to {address} within the deadline") from error
    except ssl.SSLError as error:
        raise TierRefused(f"TLS with {address} failed: {error.reason or error}") from error
    except OSError as error:
        raise TierUnavailable(f"no cache server answers on {address}: {error.strerror or error}") from error
