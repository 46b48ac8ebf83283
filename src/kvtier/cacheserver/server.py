"""The cache server: listeners, connections, metrics, start and stop. `CacheServer` may also live inside a process."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import ssl
import threading
import time
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.cacheserver.catalog import Catalog
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.connection import ConnectionContext, ServedConnection
from kvtier.cacheserver.persistence import NO_DISK, Disk, Persistence
from kvtier.cacheserver.process_watch import ProcessWatch
from kvtier.cacheserver.recovering_store import RecoveringStore
from kvtier.errors import ConfigError, LeaseError
from kvtier.memory.mapped import MappedArena
from kvtier.observe.metrics import ServerMetrics
from kvtier.sizes import format_size
from kvtier.stores.files import Files
from kvtier.transport.address import TcpAddress
from kvtier.transport.listening import UnixListener, listen_tcp

logger = logging.getLogger(__name__)

_TOUCH_STEP_BYTES = 64 << 20
_STOP_S = 10.0


class CacheServer:
    """Listening from construction on; `close` stops it. Every method may be called from any thread."""

    def __init__(self, config: CacheServerConfig, *, files: Files | None = None) -> None:
        """Raises `ConfigError`, with nothing left behind, when an address or a certificate cannot be used.

        `files` is what the disk store works on, unless it is the operating system's.
        """
        self._config = config
        self._started_at = time.time()
        self._lock = threading.Lock()
        self._connections: set[ServedConnection] = set()
        self._threads: list[threading.Thread] = []
        self._unix: UnixListener | None = None
        self._tcp: socket.socket | None = None
        self._metrics_server: tuple[WSGIServer, threading.Thread] | None = None
        tls = _tls_context(config)
        memory_bytes = config.memory_bytes // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_listeners)
            if config.unix is not None:
                self._unix = UnixListener(config.unix)
            if config.tcp is not None:
                self._tcp = listen_tcp(config.tcp)
            self._arena = MappedArena.create(memory_bytes)
            undo.callback(self._arena.close)
            self._disk = self._open_disk(files)
            undo.callback(self._disk.close)
            self.catalog = Catalog(
                memory_bytes,
                leased_bytes_per_client=config.leased_bytes_per_client,
                pinned_bytes=int(memory_bytes * config.max_pinned_share),
                lease_timeout_s=config.lease_timeout_s,
                disk=self._disk,
                keeps_stored=config.keeps_memory,
            )
            self._metrics = ServerMetrics(self.catalog.levels, self._disk.losses)
            if config.metrics is not None:
                self._metrics_server = self._serve_metrics(config.metrics)
            undo.pop_all()
        self._disk.start(self.catalog.blocks)
        self._watch = ProcessWatch(self.catalog, config.gone_grace_s)
        self._context = ConnectionContext(
            config, self.catalog, self._disk, self._arena, self._watch, self._metrics, self._describe, self._count_up
        )
        self._unused_since = time.monotonic()
        if self._unix is not None:
            self._spawn("kvtier-accept-unix", self._accept, self._unix.sock, None)
        if self._tcp is not None:
            self._spawn("kvtier-accept-tcp", self._accept, self._tcp, tls)
        if config.touches_memory:
            self._spawn("kvtier-touch-memory", self._touch_memory)
        gc.freeze()  # what start-up made stays; the collector need not walk it again

    @property
    def tcp_port(self) -> int | None:
        """The port in use, also when the configured one was 0."""
        return None if self._tcp is None else int(self._tcp.getsockname()[1])

    @property
    def metrics_port(self) -> int | None:
        return None if self._metrics_server is None else self._metrics_server[0].server_port

    @property
    def unused_s(self) -> float:
        """For how long no client has been connected, from when one could: 0 while one is."""
        with self._lock:
            return 0.0 if self._connections else time.monotonic() - self._unused_since

    def close(self) -> None:
        """Stop accepting, let requests under way end, close every connection, remove the socket."""
        self._context.is_stopping.set()
        self._close_listeners()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.stop_receiving()
        deadline = time.monotonic() + _STOP_S
        for connection in connections:
            connection.join(max(0.0, deadline - time.monotonic()))
        for connection in connections:
            connection.shut_down()
            connection.join(_STOP_S)
        for thread in self._threads:
            thread.join()
        self._watch.close()
        self._disk.close()
        try:
            self._arena.close()
        except LeaseError:
            logger.warning("a connection did not end in time; its memory goes with the process")

    def _open_disk(self, files: Files | None) -> Disk:
        config = self._config
        if config.folder is None or config.file_bytes is None:
            return NO_DISK
        store = RecoveringStore(config.folder, config.file_bytes, files)
        try:
            store.open()
        except (ConfigError, OSError) as error:
            sentence = str(error) if isinstance(error, ConfigError) else f"{config.folder}: {error.strerror or error}"
            if config.needs_disk:
                raise ConfigError(sentence) from error
            logger.warning("starting without the disk, it is tried again: %s", sentence)
        return Persistence(store, self._arena, fsync=config.fsync, stores_on=config.stores_on)

    def _describe(self) -> dict[str, object]:
        config = self._config
        return {
            "server": "kvtier",
            "memory_bytes": self._arena.nbytes,
            "unix": str(config.unix) if config.unix else None,
            "tcp": f"tcp://{config.tcp.host}:{self.tcp_port}" if config.tcp else None,
            "folder": str(config.folder) if config.folder else None,
            "file_space_bytes": config.file_bytes,
            "limits": {
                "connections": config.max_connections,
                "payload_bytes": config.max_payload_bytes,
                "leased_bytes_per_client": config.leased_bytes_per_client,
            },
            "namespaces": self.catalog.spaces_with_fields(),
        }

    def _count_up(self) -> dict[str, object]:
        names = ("hit_blocks", "missed_blocks", "stored_blocks", "sent_bytes", "received_bytes")
        counters = {name: next(iter(getattr(self._metrics, name).collect())) for name in names}
        return {
            "uptime_s": time.time() - self._started_at,
            **self.catalog.levels(),
            **{name: int(counter.samples[0].value) for name, counter in counters.items()},
            "connections": len(self._connections),
            "disk_losses": self._disk.losses(),
            "namespaces": self.catalog.spaces(),
        }

    def _spawn(self, name: str, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        while not self._context.is_stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._context.is_stopping.is_set():
                    return
                logger.warning("accept failed: %s", error)
                time.sleep(0.1)
                continue
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve(sock, tls)

    def _serve(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        try:
            connection = ServedConnection(sock, tls, self._context, self._forget)
        except OSError as error:  # it has gone again
            logger.debug("connection ended before it began: %s", error)
            sock.close()
            return
        with self._lock:
            if self._context.is_stopping.is_set():
                connection.shut_down()
                return
            is_full = len(self._connections) >= self._config.max_connections
            if not is_full:
                self._connections.add(connection)
                connection.start()
        if is_full:
            self._metrics.refusals.labels(kind="connections").inc()
            sentence = f"{self._config.max_connections} connections are open, which is the limit"
            self._context.log.warning("connections", "connection refused: %s", sentence)
            # In a thread of its own: whoever comes next must not wait until this peer has listened.
            threading.Thread(target=connection.refuse, args=(sentence,), name="kvtier-refusal", daemon=True).start()

    def _forget(self, connection: ServedConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._unused_since = time.monotonic()

    def _touch_memory(self) -> None:
        """Make every page resident, so that no first write pays for it."""
        for offset in range(0, self._arena.nbytes, _TOUCH_STEP_BYTES):
            if self._context.is_stopping.is_set():
                return
            self._arena.populate(offset, min(_TOUCH_STEP_BYTES, self._arena.nbytes - offset))
        logger.info("all of the arena's %s is resident", format_size(self._arena.nbytes))

    def _serve_metrics(self, address: TcpAddress) -> tuple[WSGIServer, threading.Thread]:
        try:
            return start_http_server(address.port, address.host, self._metrics.registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot serve metrics on {address.host}:{address.port}: {reason}") from error

    def _close_listeners(self) -> None:
        if self._unix is not None:
            self._unix.sock.shutdown(socket.SHUT_RDWR)
            self._unix.close()
        if self._tcp is not None:
            self._tcp.shutdown(socket.SHUT_RDWR)
            self._tcp.close()
        if self._metrics_server is not None:
            server, thread = self._metrics_server
            server.shutdown()
            server.server_close()
            thread.join()


def _tls_context(config: CacheServerConfig) -> ssl.SSLContext | None:
    if config.tls_certificate is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nothing unasked may arrive on an idle connection
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the TLS certificate {config.tls_certificate}: {error}") from error
    return context
