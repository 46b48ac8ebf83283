"""One connection to one node of a cluster: TCP or TLS, a user, commands out and replies in. One thread at a time."""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.errors import TierRefused, TierTimeout, TierUnavailable
from kvtier.latency_guard import give_way
from kvtier.stores.valkey.resp import Reply, ReplyError, ReplyReader, command

_MAX_VECTORS = 512
_SEND_BYTES = 16 << 20
_REFUSALS = ("WRONGPASS", "NOAUTH", "NOPERM")
_CLIENT_NAME = b"kvtier"
_TIMEVAL = struct.Struct("@ll")


@dataclass(frozen=True, slots=True)
class NodeAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """How a node is spoken to: as which user, and through TLS if there is a context.

    Without TLS, no other host than this one, unless `plaintext` says so: the cluster names its nodes itself.
    """

    user: str | None = None
    password: str | None = None
    tls: ssl.SSLContext | None = None
    plaintext: bool = False


class NodeConnection:
    """Owns its socket. After any error but a refused command it is of no use, and its owner closes it."""

    def __init__(self, address: NodeAddress, access: NodeAccess, deadline: float) -> None:
        """Connect and log in. Raises `TierUnavailable`, `TierTimeout` or `TierRefused`."""
        self.address = address
        self._timeout_s = 0.0
        self._deadline = deadline
        if access.tls is None and not access.plaintext and not is_loopback(address.host):
            raise TierRefused(f"the cluster's node {address} is another host, and is not spoken to without TLS")
        with self._translated():
            sock = socket.create_connection((address.host, address.port), self._left_s())
        self._sock: socket.socket = sock
        self._tls: ssl.SSLSocket | None = None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if access.tls is None:
                sock.settimeout(None)  # the kernel waits, and sends a large value in one go
            else:
                with self._translated():
                    self._tls = self._sock = access.tls.wrap_socket(sock, server_hostname=address.host)
            self._reader = ReplyReader(self._receive)
            self._log_in(access)
        except BaseException:
            self._sock.close()
            raise

    def _log_in(self, access: NodeAccess) -> None:
        words = [b"HELLO", b"3"]
        if access.password is not None:
            words += [b"AUTH", (access.user or "default").encode(), access.password.encode()]
        reply = self.call(command(*words, b"SETNAME", _CLIENT_NAME), self._deadline)
        if isinstance(reply, ReplyError):
            raise TierRefused(f"the cluster's node {self.address} refused to talk: {reply.sentence}")

    def call(self, request: bytes, deadline: float) -> Reply:
        """One command and its reply."""
        self.send([request], deadline)
        return self.read(deadline)

    def ask(self, request: bytes, deadline: float) -> Reply:
        """As `call`, but a refused command raises `TierRefused`."""
        reply = self.call(request, deadline)
        if isinstance(reply, ReplyError):
            raise TierRefused(f"the cluster's node {self.address} refused: {reply.sentence}")
        return reply

    def send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """All of the parts, gathered from where they lie."""
        give_way()
        self._deadline = deadline
        left = [memoryview(part) for part in parts if len(part)]
        position = 0
        with self._translated():
            while position < len(left):
                self._arm()
                if self._tls is not None:
                    sent = self._tls.send(left[position][:_SEND_BYTES])
                else:
                    end, nbytes = position + 1, len(left[position])
                    while end < len(left) and nbytes < _SEND_BYTES and end - position < _MAX_VECTORS:
                        nbytes += len(left[end])
                        end += 1
                    sent = self._sock.sendmsg(left[position:end])
                while position < len(left) and sent >= len(left[position]):
                    sent -= len(left[position])
                    position += 1
                if sent:
                    left[position] = left[position][sent:]

    def read(self, deadline: float, into: Sequence[memoryview] | None = None, *, longest: int | None = None) -> Reply:
        """The next reply; see `ReplyReader.read`."""
        self._deadline = deadline
        return self._reader.read(into, longest=longest)

    def has_ended(self) -> bool:
        """Whether the node has closed the connection, or sent an unexpected reply."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return self._reader.has_more or bool(poll.poll(0))

    def close(self) -> None:
        self._sock.close()

    def _receive(self, buffers: list[memoryview]) -> int:
        with self._translated():
            self._arm()
            tls = self._tls
            received = self._sock.recvmsg_into(buffers)[0] if tls is None else tls.recv_into(buffers[0])
        if not received:
            raise TierUnavailable(f"the cluster's node {self.address} closed the connection")
        give_way()
        return received

    def _arm(self) -> None:
        """No call waits much longer than until the deadline; setting that for each would cost a call of its own."""
        left_s = self._left_s()
        if not left_s <= self._timeout_s <= 1.25 * left_s:
            self._timeout_s = left_s
            if self._tls is not None:  # the TLS layer retries by itself what the socket gives up
                self._tls.settimeout(left_s)
                return
            packed = _TIMEVAL.pack(int(left_s), max(1, int(left_s % 1 * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def _left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TierTimeout(f"no answer from the cluster's node {self.address} within the deadline")
        return left_s

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, BlockingIOError) as error:
            raise TierTimeout(f"no answer from the cluster's node {self.address} within the deadline") from error
        except ssl.SSLError as error:
            raise TierRefused(f"TLS with the cluster's node {self.address} failed: {error.reason or error}") from error
        except OSError as error:
            reason = error.strerror or error
            raise TierUnavailable(f"the cluster's node {self.address} does not answer: {reason}") from error


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_refusal(error: ReplyError) -> bool:
    """Asking again will not help: the user or its rights are wrong."""
    return error.code in _REFUSALS
