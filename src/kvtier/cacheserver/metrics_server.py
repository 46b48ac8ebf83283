"""Serves metrics over HTTP to a scraper, from one thread, however many peers connect and however slow they are."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvtier.errors import ConfigError
from kvtier.transport.address import TcpAddress
from kvtier.transport.listening import listen_tcp

logger = logging.getLogger(__name__)

_MAX_PEERS = 32
_MAX_HEAD_BYTES = 16 << 10
_PEER_S = 5.0
"""Time limit for a request and its answer."""
_PIECE_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class _Peer:
    sock: socket.socket
    ends_at: float
    head: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class MetricsServer:
    """Listens from construction until `close`. Raises `ConfigError` if the address cannot be used."""

    def __init__(self, address: TcpAddress, registry: CollectorRegistry) -> None:
        self._registry = registry
        try:
            self._listener = listen_tcp(address)
        except ConfigError as error:
            reason = str(error).rpartition(": ")[2]
            raise ConfigError(f"cannot serve metrics on {address.host}:{address.port}: {reason}") from error
        self._listener.setblocking(False)
        self._wake, self._wakes = socket.socketpair()
        self._peers: dict[_Peer, None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kvtier-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            left_s = min((peer.ends_at for peer in self._peers), default=time.monotonic() + 60.0) - time.monotonic()
            for key, _ in self._selector.select(max(0.0, left_s)):
                if key.fileobj is self._wakes:
                    self._end()
                    return
                if key.data is None:
                    self._accept()
                elif key.data in self._peers:
                    self._serve(key.data)
            now = time.monotonic()
            for peer in [peer for peer in self._peers if peer.ends_at <= now]:
                self._leave(peer)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            time.sleep(0.1)  # perhaps out of descriptors: try again later
            return
        peer = _Peer(sock, time.monotonic() + _PEER_S)
        self._peers[peer] = None
        try:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, peer)
        except Exception as error:  # whatever it was, the next peer is served
            logger.warning("a metrics connection could not be accepted: %s", error)
            self._leave(peer)
            return
        if len(self._peers) > _MAX_PEERS:
            self._leave(next(iter(self._peers)))  # the oldest makes room

    def _serve(self, peer: _Peer) -> None:
        try:
            if peer.answer is None:
                self._read(peer)
            elif not peer.answer:
                if not peer.sock.recv(_PIECE_BYTES):  # the peer has read the whole answer
                    self._leave(peer)
            else:
                peer.answer = peer.answer[peer.sock.send(peer.answer[:_PIECE_BYTES]) :]
                if not peer.answer:
                    peer.sock.shutdown(socket.SHUT_WR)
                    self._selector.modify(peer.sock, selectors.EVENT_READ, peer)
        except BlockingIOError:
            pass
        except OSError:
            self._leave(peer)
        except Exception:  # a metric's callback failed; the next scrape is still served
            logger.exception("metrics could not be collected: a bug in the cache server")
            self._leave(peer)

    def _read(self, peer: _Peer) -> None:
        piece = peer.sock.recv(_MAX_HEAD_BYTES)
        peer.head += piece
        if not piece or len(peer.head) > _MAX_HEAD_BYTES:
            self._leave(peer)
        elif b"\r\n\r\n" in peer.head:
            peer.answer = memoryview(self._answer(bytes(peer.head)))
            self._selector.modify(peer.sock, selectors.EVENT_WRITE, peer)

    def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        method = lines[0].partition(" ")[0]
        accept = next((line.partition(":")[2] for line in lines if line.lower().startswith("accept:")), "")
        if method in ("GET", "HEAD"):
            encode, content_type = choose_encoder(accept)
            status, body = "200 OK", encode(self._registry)
        else:
            status, body, content_type = "405 Method Not Allowed", b"only GET\n", "text/plain"
        answer = (
            f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()
        return answer if method == "HEAD" else answer + body

    def _leave(self, peer: _Peer) -> None:
        del self._peers[peer]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        peer.sock.close()

    def _end(self) -> None:
        for peer in list(self._peers):
            self._leave(peer)
        self._selector.close()
        self._listener.close()
        self._wakes.close()
