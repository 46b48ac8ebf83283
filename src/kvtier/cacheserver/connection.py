"""One client connection: its thread reads a request, has it carried out, and replies, until the peer disconnects.

Bad input from a peer ends its own connection at worst.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from kvtier.cacheserver.client_requests import ClientRequests
from kvtier.cacheserver.connection_context import ConnectionContext
from kvtier.cacheserver.tenants import PROCESS_OF_THIS_HOST, Credential, Tenant
from kvtier.errors import (
    KvtierError,
    RemoteProtocolError,
    TierError,
    TierRefused,
    TierTimeout,
)
from kvtier.transport.listening import peer_process
from kvtier.transport.stream import MinimumRate, Stream
from kvtier.wire import messages as wire
from kvtier.wire.frames import HANDSHAKE_LIMITS, MAX_BODY_BYTES, BufferList, Frame, FrameLimits
from kvtier.wire.session import DECLINES, ENCRYPTED_SERVER, PLACES, SERVER, ServerSession

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
"""Time limit for the whole handshake, including TLS."""
_WRONG_TOKEN_S = 1.0
"""Delay after a wrong token."""
_SLOWEST_BYTES_PER_S = 256 << 10
_LAST_WORDS_S = 0.5


class ServedConnection:
    """Owns its socket and its thread, which calls `on_end` last."""

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
        context: ConnectionContext,
        on_end: Callable[[ServedConnection], None],
    ) -> None:
        self._context = context
        self.is_unix = sock.family == socket.AF_UNIX
        self._peer = "a process of this host" if self.is_unix else _shown(sock)
        self.address = "" if self.is_unix else _network_of(sock)
        self._is_ending = threading.Event()
        self._on_end = on_end
        # The TLS handshake takes several messages, so it happens later, in the connection's own thread.
        self._sock = sock if tls is None else tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._stream = Stream(self._sock, self._place, HANDSHAKE_LIMITS)
        self._requests: ClientRequests | None = None
        self._let_in_by: tuple[Tenant, Credential] | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-connection", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def discard(self) -> None:
        """Close a connection whose thread was never started."""
        self._stream.close()

    def end_if_unknown(self) -> None:
        """Shut down if the credential used at the handshake is no longer valid."""
        if self._let_in_by is not None and not self._context.catalog.tenants.still_knows(*self._let_in_by):
            self._context.log.warning("revoked", "connection closed: the credential of %s was revoked", self._peer)
            self.shut_down()

    def stop_receiving(self) -> None:
        """Take no more requests; the current one is still answered."""
        self._is_ending.set()
        self._stream.stop_receiving()

    def shut_down(self) -> None:
        self._is_ending.set()
        self._stream.shut_down()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:  # a connection just being accepted ends by itself
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            session, requests = self._shake_hands()
            config = self._context.config
            self._stream.set_timeout(config.stall_timeout_s)
            self._stream.pace = MinimumRate(min(config.stall_timeout_s, config.lease_timeout_s), _SLOWEST_BYTES_PER_S)
            while not self._context.is_stopping.is_set():
                frame = self._next_frame()
                if frame is None:
                    break
                requests.answer(frame.request, session.request(frame.message))
                del frame  # free its memory now: the next request may be long in coming
        except TierError as error:
            logger.debug("connection ended: %s", error)
        except RemoteProtocolError as error:
            self._context.metrics.refusals.labels(kind="protocol").inc()
            self._context.log.warning("protocol", "connection of %s closed: %s", self._peer, error)
            self._send_last(wire.Failure("protocol", str(error)))
        except Exception:
            logger.exception("connection closed by a bug in the cache server")
        finally:
            self._end()

    def _shake_hands(self) -> tuple[ServerSession, ClientRequests]:
        context = self._context
        config = context.config
        deadline = time.monotonic() + _HANDSHAKE_S
        self._stream.start_tls(_HANDSHAKE_S)
        try:
            known, tokens = self._identify()
            arena_bytes = context.arena.nbytes if self.is_unix else 0
            secret = None if self.is_unix else config.tcp_secret
            session = ServerSession(
                wire.Welcome(
                    SERVER if secret is None else ENCRYPTED_SERVER,
                    context.server_id,
                    b"",
                    arena_bytes,
                    config.max_payload_bytes,
                    config.folder is not None,
                ),
                tokens,
                FrameLimits(MAX_BODY_BYTES, config.max_payload_bytes),
                secret,
                0 if config.cluster is None else config.cluster.segment,
            )
            while not session.is_open:
                frame = self._stream.receive(deadline)
                answer = session.shake(frame.message)
                if not session.is_open:
                    self._stream.send(frame.request, answer, deadline=deadline)
            assert session.hello is not None
            if known is None and session.token is not None:
                known = context.catalog.tenants.holder_of(session.token)
            if known is None:
                raise TierRefused("the token is no longer valid")
            requests = self._join(session.hello, *known)
        except TierRefused as error:
            context.metrics.refusals.labels(kind="refused").inc()
            context.log.warning("refused", "%s refused: %s", self._peer, error)
            if not self.is_unix:
                self._is_ending.wait(_WRONG_TOKEN_S)  # cut short when another stranger needs the place
            self._send_last(wire.Failure("refused", str(error)))
            raise
        self._stream.set_limits(session.limits)
        pass_fd = context.arena.fd if self.is_unix else None
        self._stream.send(frame.request, answer, deadline=deadline, pass_fd=pass_fd)
        if session.seals is not None:
            self._stream.encrypt(session.seals)
        return session, requests

    def _identify(self) -> tuple[tuple[Tenant, Credential] | None, list[bytes]]:
        """The peer's identity if known before its first message; else the tokens of which it must know one."""
        tenants = self._context.catalog.tenants
        if self.is_unix:
            return (tenants.owner, PROCESS_OF_THIS_HOST), []
        if isinstance(self._sock, ssl.SSLSocket):
            certified = tenants.certified(_certified_names(self._sock))
            if certified is not None:
                return certified, []
        tokens = tenants.tokens()
        if not tokens:
            raise TierRefused("no tenant has this certificate, and the server has no tokens")
        return None, tokens

    def _join(self, hello: wire.Hello, tenant: Tenant, credential: Credential) -> ClientRequests:
        context = self._context
        context.guests.let_in(self, tenant)
        self._let_in_by = (tenant, credential)
        if not context.catalog.tenants.still_knows(tenant, credential):  # the tenants' file was reloaded meanwhile
            raise TierRefused("the token or certificate is no longer valid")
        if tenant.name:
            self._peer = f"the tenant {tenant.name} ({self._peer})"
        pid, pidfd = peer_process(self._sock) if self.is_unix else (None, None)
        try:
            client = context.catalog.join(hello.holder, pid, tenant)
        except TierRefused:
            if pidfd is not None:
                socket.close(pidfd)
            raise
        self._stream.bodies = tenant.bodies
        self._requests = ClientRequests(
            context,
            client,
            self._stream,
            may_write=credential.may_write,
            knows_places=hello.client.endswith(PLACES),
            takes_declines=DECLINES in hello.client,
        )
        if pidfd is not None:
            context.watch.watch(client, pidfd)
        return self._requests

    def _next_frame(self) -> Frame[wire.Message] | None:
        """The next request; None if the peer disconnected between two requests."""
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

    def _send_last(self, failure: wire.Failure) -> None:
        try:
            self._stream.send(0, failure, deadline=time.monotonic() + _LAST_WORDS_S)
            self._stream.drain(_LAST_WORDS_S)
        except KvtierError:
            pass  # the peer is gone

    def _end(self) -> None:
        if self._requests is not None:
            self._requests.close()
        self._stream.shut_down()
        self._stream.close()
        self._on_end(self)


def _shown(sock: socket.socket) -> str:
    """The address of a TCP peer, for log lines."""
    host, port = sock.getpeername()[:2]
    return f"{host}:{port}"


def _network_of(sock: socket.socket) -> str:
    """The address of a TCP peer's host; for IPv6 its /64, since one host usually has all of it."""
    address = ipaddress.ip_address(sock.getpeername()[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _certified_names(sock: ssl.SSLSocket) -> list[str]:
    """The names that a trusted certificate gives to the peer: its common name and its DNS names."""
    certificate: Any = sock.getpeercert() or {}
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    for part in certificate.get("subject", ()):
        names += [value for kind, value in part if kind == "commonName"]
    return names
