"""The cache server: listeners, connections, metrics, start and stop. `CacheServer` may also live inside a process."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import ssl
import threading
import time

import msgspec

from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.cacheserver.catalog import Catalog
from kvtier.cacheserver.cluster_below import NO_CLUSTER, ClusterBelow, SharedCluster
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.connection import ServedConnection
from kvtier.cacheserver.connection_context import ConnectionContext
from kvtier.cacheserver.disk_admission import DiskAdmission, WriteBudget
from kvtier.cacheserver.guests import Guests, LastWords
from kvtier.cacheserver.metrics_server import MetricsServer
from kvtier.cacheserver.persistence import NO_DISK, Disk, Persistence
from kvtier.cacheserver.process_watch import ProcessWatch
from kvtier.cacheserver.recovering_store import RecoveringStore
from kvtier.cacheserver.sealer import LATEST_S, NO_SEALER, NoSealer, Sealer
from kvtier.cacheserver.tenants import Tenant, Tenants
from kvtier.cacheserver.traffic import ServerTraffic
from kvtier.errors import ConfigError, LeaseError
from kvtier.memory.heap import give_back_large_buffers
from kvtier.memory.mapped import MappedArena
from kvtier.observe.metrics import ServerMetrics
from kvtier.observe.recent_warnings import RecentWarnings
from kvtier.sizes import format_size
from kvtier.stores.cipher import sealing_files
from kvtier.stores.files import Files
from kvtier.stores.valkey.config import ClusterUse
from kvtier.transport.listening import UnixListener, listen_tcp
from kvtier.wire import messages as wire
from kvtier.wire.frames import encode_frame

logger = logging.getLogger(__name__)

_TOUCH_STEP_BYTES = 64 << 20
_STOP_S = 10.0
_ACCEPT_PAUSE_S = 0.1
_MAX_TOLD_WARNINGS = 20


class CacheServer:
    """Listens from construction until `close`. Every method may be called from any thread."""

    def __init__(
        self, config: CacheServerConfig, *, files: Files | None = None, warnings: RecentWarnings | None = None
    ) -> None:
        """Raises `ConfigError`, with nothing left behind, if an address or a certificate cannot be used.

        `files` replaces the operating system's files (encrypted if there is a key) under the disk store. `warnings`
        holds this process's latest log warnings, which the owner and admins may read.
        """
        files = sealing_files(config.key_file) if files is None else files
        self._config = config
        self._started_at = time.time()
        self._guests = Guests(config.max_connections)
        self._last_words = LastWords()
        self._threads: list[threading.Thread] = []
        self._unix: UnixListener | None = None
        self._tcp: socket.socket | None = None
        self._metrics_server: MetricsServer | None = None
        tls = _tls_context(config)
        memory_bytes = config.memory_bytes // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES
        self._tenants = Tenants(
            memory_bytes=memory_bytes,
            file_bytes=config.file_bytes,
            file=config.tenants_file,
            token=config.token,
            pinned_share=config.max_pinned_share,
            retained_share=config.max_retained_share,
        )
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
            cluster = _cluster_below(config, self._arena)
            undo.callback(cluster.close)
            sealer = self._make_sealer()
            undo.callback(sealer.close)
            self.catalog = Catalog(
                memory_bytes,
                leased_bytes_per_client=config.leased_bytes_per_client,
                pinned_bytes=int(memory_bytes * config.max_pinned_share),
                lease_timeout_s=config.lease_timeout_s,
                tenants=self._tenants,
                disk=self._disk,
                keeps_stored=config.keeps_memory,
                eviction=config.eviction,
                sealer=sealer,
                cluster=cluster,
            )
            self._metrics = ServerMetrics(
                self.catalog.inventory.levels,
                self._disk.losses,
                self.catalog.inventory.tenant_levels,
                cluster.losses,
            )
            if config.metrics is not None:
                self._metrics_server = MetricsServer(config.metrics, self._metrics.registry)
            undo.pop_all()
        self._disk.start(self.catalog.blocks)
        cluster.start(self.catalog.blocks, self._disk, self.catalog.inventory.fields_of)
        self._watch = ProcessWatch(self.catalog, config.gone_grace_s, self._look_after)
        self._context = ConnectionContext(
            config,
            self.catalog,
            self._disk,
            cluster,
            self._arena,
            sealer,
            self._watch,
            self._guests,
            self._metrics,
            ServerTraffic(memory_bytes, config.file_bytes if config.folder is not None else None, config.eviction),
            self._describe,
            self._count_up,
            RecentWarnings() if warnings is None else warnings,
        )
        if self._unix is not None:
            self._spawn("kvtier-accept-unix", self._accept, self._unix.sock, None)
        if self._tcp is not None:
            self._spawn("kvtier-accept-tcp", self._accept, self._tcp, tls)
        if config.touches_memory:
            self._spawn("kvtier-touch-memory", self._touch_memory)
        give_back_large_buffers()
        gc.freeze()  # objects made at start-up stay, so the garbage collector need not walk them

    @property
    def tcp_port(self) -> int | None:
        """The port in use, even if the configured one was 0."""
        return None if self._tcp is None else int(self._tcp.getsockname()[1])

    @property
    def metrics_port(self) -> int | None:
        return None if self._metrics_server is None else self._metrics_server.port

    def stats(self) -> dict[str, object]:
        """All statistics, as `kvtier cache stats` shows them to the owner."""
        return self._count_up(self._tenants.owner)

    def miss_curve(self) -> dict[str, object]:
        """The hits that caches of other sizes would have had; the reply to `MissCurveRequest`."""
        return self._context.traffic.curve()

    def newest_notes(self, count: int) -> list[tuple[str, str]]:
        """Engines' notes on their latest requests: ids and explanations in JSON, newest first."""
        return self._tenants.owner.notes.newest(count)

    @property
    def unused_s(self) -> float:
        """Seconds since the last client left, or since the start if none came; 0 while a client is connected."""
        return self._guests.unused_s

    def close(self) -> None:
        """Stop accepting, finish the requests in progress, close every connection, and remove the socket."""
        self._context.is_stopping.set()
        self._close_listeners()
        connections = self._connections()
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
        self._last_words.close()
        self._context.cluster.close()
        self._disk.close()
        self._context.sealer.close()
        try:
            self._arena.close()
        except LeaseError:
            logger.warning("a connection did not end in time; the arena stays mapped until the process ends")

    def _open_disk(self, files: Files | None) -> Disk:
        config = self._config
        if config.folder is None or config.file_bytes is None:
            return NO_DISK
        tenants = self._tenants
        share_of = (lambda name: tenants.owner_of(name).disk) if tenants.has_several else None
        store = RecoveringStore(config.folder, config.file_bytes, files, share_of, config.eviction)
        try:
            store.open()
        except (ConfigError, OSError) as error:
            sentence = str(error) if isinstance(error, ConfigError) else f"{config.folder}: {error.strerror or error}"
            if config.needs_disk:
                raise ConfigError(sentence) from error
            logger.warning("starting without the disk, which is retried: %s", sentence)
        budget = None if config.disk_writes_per_day is None else WriteBudget(config.disk_writes_per_day)
        admission = DiskAdmission(config.stores_on, budget)
        return Persistence(store, self._arena, fsync=config.fsync, admission=admission)

    def _make_sealer(self) -> Sealer | NoSealer:
        config = self._config
        if config.tcp is None and config.folder is None and config.cluster is None:
            return NO_SEALER
        if config.folder is not None and config.stores_on == "commit":
            return Sealer(self._arena, quiet_s=LATEST_S)  # as late as possible: usually the disk's writers do its work
        return Sealer(self._arena)

    def _describe(self, asker: Tenant) -> dict[str, object]:
        config = self._config
        described: dict[str, object] = {
            "server": "kvtier",
            "memory_bytes": self._arena.nbytes,
            "file_space_bytes": config.file_bytes,
            "limits": {
                "connections": config.max_connections,
                "payload_bytes": config.max_payload_bytes,
                "leased_bytes_per_client": config.leased_bytes_per_client,
            },
            "namespaces": self.catalog.inventory.spaces_with_fields(asker),
        }
        if asker.sees_all:
            described |= {
                "unix": str(config.unix) if config.unix else None,
                "tcp": f"tcp://{config.tcp.host}:{self.tcp_port}" if config.tcp else None,
                "folder": str(config.folder) if config.folder else None,
                "cluster": list(config.cluster.valkey) if config.cluster else None,
                "cluster_use": self._describe_cluster(),
            }
        return described

    def _describe_cluster(self) -> dict[str, object] | None:
        config = self._config
        if config.cluster is None:
            return None
        return msgspec.structs.asdict(ClusterUse.of(config.cluster, config.shares_on, config.share_bytes_per_s))

    def _count_up(self, asker: Tenant) -> dict[str, object]:
        """The statistics that `asker` may see: all, or a tenant's own."""
        if not asker.sees_all:
            return {
                "uptime_s": time.time() - self._started_at,
                "tenant": asker.name,
                **self.catalog.inventory.levels_of(asker),
                "connections": asker.num_connections,
                "namespaces": self.catalog.inventory.spaces(asker),
            }
        names = ("hit_blocks", "missed_blocks", "stored_blocks", "sent_bytes", "received_bytes")
        counters = {name: next(iter(getattr(self._metrics, name).collect())) for name in names}
        return {
            "uptime_s": time.time() - self._started_at,
            **self.catalog.inventory.levels(),
            **{name: int(counter.samples[0].value) for name, counter in counters.items()},
            "connections": self._guests.num_clients,
            "disk_losses": self._disk.losses(),
            "cluster_losses": self._context.cluster.losses(),
            "unsealed_blocks": self._context.sealer.num_queued,
            "namespaces": self.catalog.inventory.spaces(),
            "warnings": [[one.at, one.level, one.text] for one in self._context.warnings.newest()[:_MAX_TOLD_WARNINGS]],
            **({"tenants": self.catalog.inventory.tenant_levels()} if self._tenants.has_several else {}),
        }

    def _connections(self) -> list[ServedConnection]:
        return [guest for guest in self._guests.connected() if isinstance(guest, ServedConnection)]

    def _look_after(self) -> None:
        """Called about once a second."""
        self._last_words.close_late()
        if self._tenants.reload():
            for connection in self._connections():
                connection.end_if_unknown()

    def _spawn(self, name: str, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        while not self._context.is_stopping.is_set():
            sock: socket.socket | None = None
            try:
                sock, _ = listener.accept()
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._serve(sock, tls)
            except Exception as error:  # say, out of threads or descriptors: go on accepting
                if sock is not None:
                    sock.close()
                if self._context.is_stopping.is_set():
                    return
                self._context.log.warning("accept", "a connection could not be accepted: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)

    def _serve(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        try:
            connection = ServedConnection(sock, tls, self._context, self._guests.leave)
        except OSError as error:  # the peer is gone already
            logger.debug("connection ended before it began: %s", error)
            sock.close()
            return
        sentence = self._guests.arrive(connection)
        if sentence is None:
            try:
                connection.start()
            except BaseException:
                self._guests.leave(connection)
                connection.discard()
                raise
            if self._context.is_stopping.is_set():
                connection.shut_down()
            return
        self._metrics.refusals.labels(kind="connections").inc()
        self._context.log.warning("connections", "connection refused: %s", sentence)
        if tls is not None:  # a sentence could be sent only after a TLS handshake
            connection.discard()
            return
        # In the background: the next peer must not wait for this one to read.
        self._last_words.say(sock, encode_frame(0, wire.encode(wire.Failure("refused", sentence))))

    def _touch_memory(self) -> None:
        """Make every page resident, so that no first write has to wait for one."""
        for offset in range(0, self._arena.nbytes, _TOUCH_STEP_BYTES):
            if self._context.is_stopping.is_set():
                return
            self._arena.populate(offset, min(_TOUCH_STEP_BYTES, self._arena.nbytes - offset))
        logger.info("all of the arena's %s is resident", format_size(self._arena.nbytes))

    def _close_listeners(self) -> None:
        if self._unix is not None:
            self._unix.sock.shutdown(socket.SHUT_RDWR)
            self._unix.close()
        if self._tcp is not None:
            self._tcp.shutdown(socket.SHUT_RDWR)
            self._tcp.close()
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None


def _cluster_below(config: CacheServerConfig, arena: MappedArena) -> SharedCluster:
    if config.cluster is None:
        return NO_CLUSTER
    return ClusterBelow(
        config.cluster,
        arena,
        shares_on=config.shares_on,
        write_bytes_per_s=config.share_bytes_per_s,
        is_last_place=config.folder is None,
    )


def _tls_context(config: CacheServerConfig) -> ssl.SSLContext | None:
    if config.tls_certificate is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # an idle connection must not receive unsolicited messages
    if config.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_OPTIONAL  # a peer without a certificate needs a token
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot use the certificates in {config.tls_client_ca}: {error}") from error
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the TLS certificate {config.tls_certificate}: {error}") from error
    return context
