"""One cache server as a client sees it: pooled connections, the mapped arena, the breaker, the way back.

Thread-safe. A thread of its own, started with the first need, reconnects to a server that died and ends leases whose
release did not get through.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from kvtier.blocks.namespace import Namespace
from kvtier.client.breaker import Breaker
from kvtier.client.connection import Connection
from kvtier.errors import (
    BlockCorrupt,
    LeaseError,
    ProtocolError,
    TierError,
    TierFull,
    TierRefused,
    TierTimeout,
    TierUnavailable,
)
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.metrics import TierMetrics
from kvtier.transport.address import Address, UnixAddress
from kvtier.wire import messages as wire

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0
_CHORE_LOOK_S = 0.05  # how soon whoever waits for chores notices that the server is down
_CONNECT_S = 2.0
_ENDING_S = 0.5


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _forget_parent() -> None:
    for endpoint in list(_endpoints):
        endpoint.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)


class _AllBusy(TierTimeout):
    """No connection came free in time."""


class Endpoint:
    """Connections to `address`. `namespace` is opened on each of them, unless it is None."""

    def __init__(
        self,
        address: Address,
        *,
        namespace: Namespace | None,
        name: str,
        block_bytes: int,
        block_tokens: int,
        fields: str,
        token: bytes | None,
        tls: ssl.SSLContext | None,
        max_connections: int,
        metrics: TierMetrics,
        metrics_label: str,
    ) -> None:
        self.address = address
        self.is_local = isinstance(address, UnixAddress)
        self.breaker = Breaker()
        self.has_disk = False
        self.num_returns = 0
        self._namespace = namespace
        self._name = name
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._fields = fields
        self._token = None if self.is_local else token
        self._tls = None if self.is_local else tls
        self._metrics = metrics
        self._label = metrics_label
        self._log = LogLimit(logger)
        self._condition = threading.Condition()
        self._idle: list[Connection] = []
        self._num_open = 0
        self._has_connected = False
        self._max_connections = max_connections
        self._arena: MappedArena | None = None
        self._server_id = b""
        self._numbers = iter(range(1, 1 << 62))
        self._chores: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._holder = secrets.token_bytes(wire.HOLDER_BYTES)
        _endpoints.add(self)

    @property
    def arena(self) -> MappedArena:
        with self._condition:
            if self._arena is None:
                raise TierUnavailable(f"{self.address} has no memory that this process has mapped")
            return self._arena

    def next_number(self) -> int:
        """A number for a lease or reservation, never used before by this client."""
        with self._condition:
            return next(self._numbers)

    @contextlib.contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """A connection for this thread alone. Errors inside end it; tier errors also count and move the breaker."""
        connection: Connection | None = None
        is_usable = False
        try:
            connection = self._check_out(deadline)
            yield connection
            is_usable = True
            self.breaker.succeed()
        except (TierRefused, TierFull) as error:
            is_usable = connection is not None
            if not is_usable:
                self._note(error)
            raise
        except (_AllBusy, BlockCorrupt):
            raise  # our own doing, or one block's: the server is well
        except TierError as error:
            self._note(error)
            raise
        except ProtocolError as error:  # a server that breaks the protocol is one that cannot be used
            self._note(error)
            raise TierUnavailable(str(error)) from error
        finally:
            if connection is not None:
                self._check_in(connection, is_usable)

    def count_failure(self, error: Exception) -> None:
        """Count and log a failure that a call turns into a miss."""
        kind = error.kind if isinstance(error, TierError) else "protocol"
        self._metrics.failures.labels(tier=self._label, kind=kind).inc()
        # As text: an error kept by a log would keep the caller's buffers, which its traceback refers to.
        self._log.warning(kind, "cache server %s: %s", self.address, str(error))

    def arena_of(self, connection: Connection) -> MappedArena:
        """The arena of the server behind `connection`."""
        with self._condition:
            if self._arena is None or connection.welcome.server_id != self._server_id:
                raise TierUnavailable("the cache server was replaced by another one")
            return self._arena

    def do_later(self, chore: Callable[[], object]) -> None:
        """Run `chore` on the endpoint's thread. One that raises `TierUnavailable` or `TierTimeout` is tried again."""
        with self._condition:
            if self._is_closed:
                return
            self._chores.append(chore)
            self._wake()

    def forget(self, chore: Callable[[], object]) -> None:
        """As `do_later`, from the garbage collector: takes no lock, and is done with the next thing that is."""
        self._chores.append(chore)

    def wait_for_chores(self, deadline: float) -> None:
        """Until what was put off before is done. Raises `TierTimeout`, or `TierUnavailable` once the server is down."""
        if self._is_closed:
            raise TierUnavailable("this client is closed")
        done = threading.Event()
        is_asked = False
        while not done.is_set():
            if self.breaker.is_open:
                raise TierUnavailable(f"cache server {self.address} is down; it is tried again in the background")
            if not is_asked:
                self.do_later(done.set)
                is_asked = True
            left = deadline - time.monotonic()
            if left <= 0:
                raise TierTimeout("deferred work is not done within the deadline")
            done.wait(min(left, _CHORE_LOOK_S))

    def close(self) -> None:
        """Finish what was put off, give everything back and disconnect. Safe to call twice."""
        with self._condition:
            if self._is_closed:
                return
        if self._chores:
            with contextlib.suppress(TierError):
                self.wait_for_chores(time.monotonic() + _CONNECT_S)
        # Only then may the server give the memory to somebody else.
        if self._arena is None or self._arena.stop_use(_CONNECT_S):
            self._say_goodbye()
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            # If it is trying to reach a server that is down, it ends by itself when that has failed.
            thread.join(_ENDING_S if self.breaker.is_open else None)
        with self._condition:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self._arena is not None:
            with contextlib.suppress(LeaseError):  # views in use keep the mapping; the process's end unmaps it
                self._arena.close()

    def _say_goodbye(self) -> None:
        """Tell a living server that nothing of its memory is used here any more."""
        if self.breaker.is_open or not self._has_connected:
            return
        deadline = time.monotonic() + _CONNECT_S
        with contextlib.suppress(TierError, ProtocolError, TierFull):
            with self.connection(deadline) as connection:
                connection.call(wire.Bye(), wire.Done, deadline)

    # --- connections -----------------------------------------------------------------------------------------------

    def _check_out(self, deadline: float) -> Connection:
        with self._condition:
            if self._is_closed:
                raise TierUnavailable("this client is closed")
            if self.breaker.is_open:
                raise TierUnavailable(f"cache server {self.address} is down; it is tried again in the background")
            while True:
                while self._idle:
                    connection = self._idle.pop()
                    if not connection.has_ended():
                        return connection
                    self._discard(connection)
                if self._num_open < self._max_connections:
                    self._num_open += 1
                    break
                if not self._condition.wait(max(0.0, deadline - time.monotonic())):
                    raise _AllBusy("all connections of this client are busy")
        return self._connect_counted(deadline)

    def _check_in(self, connection: Connection, is_usable: bool) -> None:
        with self._condition:
            if is_usable and not self._is_closed:
                self._idle.append(connection)
            else:
                self._discard(connection)
            if self._chores:
                self._wake()
            self._condition.notify()

    def _discard(self, connection: Connection) -> None:
        connection.close()
        self._num_open -= 1

    def _connect_counted(self, deadline: float) -> Connection:
        """Connect for a caller that has already counted the connection."""
        try:
            return self._connect(deadline)
        except BaseException:
            with self._condition:
                self._num_open -= 1
                self._condition.notify()
            raise

    def _connect(self, deadline: float) -> Connection:
        connection = Connection(self.address, self._holder, self._token, self._tls, deadline)
        try:
            self._map_arena(connection)
            self._has_connected = True
            self.has_disk = connection.welcome.has_disk
            if self._namespace is not None:
                request = wire.Open(self._namespace, self._name, self._block_bytes, self._block_tokens, self._fields)
                connection.space = connection.call(request, wire.Opened, deadline).space
            return connection
        except BaseException:
            connection.close()
            raise

    def _map_arena(self, connection: Connection) -> None:
        if not self.is_local:
            return
        fd = connection.take_arena_fd()
        with self._condition:
            if self._is_closed:
                os.close(fd)
                raise TierUnavailable("this client is closed")
            if connection.welcome.server_id == self._server_id:
                os.close(fd)
                return
            # An old arena stays mapped as long as leases on it keep their views.
            self._arena = MappedArena.attach(fd, connection.welcome.arena_bytes)
            self._server_id = connection.welcome.server_id
            stale, self._idle = self._idle, []
            for old in stale:
                self._discard(old)

    def forget_parent(self) -> None:
        """In a forked child: the parent's connections, leases, thread and locks are not ours."""
        self._condition = threading.Condition()
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self._num_open = 0
        self._thread = None
        self._chores = deque()
        self._has_connected = False
        self._holder = secrets.token_bytes(wire.HOLDER_BYTES)

    # --- failure and recovery --------------------------------------------------------------------------------------

    def _note(self, error: Exception) -> None:
        if self._is_closed or (isinstance(error, TierUnavailable) and self.breaker.is_open):
            return
        if self.breaker.fail(timed_out=isinstance(error, TierTimeout)):
            logger.warning("cache server down address=%s: %s", self.address, str(error))
            with self._condition:
                self._wake()

    def _wake(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="kvtier-client", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            with self._condition:
                while not self._is_closed and not self.breaker.is_open and not self._chores:
                    self._condition.wait()
                if self._is_closed and (not self._chores or self.breaker.is_open):
                    return
            if self.breaker.is_open:
                if self._come_back():
                    retry_s = _FIRST_RETRY_S
                    continue
                with self._condition:
                    self._condition.wait_for(lambda: self._is_closed, retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                continue
            self._do_chore()

    def _come_back(self) -> bool:
        with self._condition:
            self._num_open += 1
        try:
            connection = self._connect_counted(time.monotonic() + _CONNECT_S)
        except (TierError, ProtocolError) as error:
            if not self._is_closed:
                self._log.warning("down", "cache server %s is still down: %s", self.address, str(error))
            return False
        self.breaker.close()
        self.num_returns += 1
        self._check_in(connection, is_usable=True)
        logger.info("cache server up address=%s", self.address)
        return True

    def _do_chore(self) -> None:
        chore = self._chores[0]
        try:
            chore()
        except (TierTimeout, TierUnavailable):
            if self._is_closed:
                self._chores.popleft()
            return
        except (TierError, ProtocolError, TierFull) as error:
            self.count_failure(error)
        except Exception:
            logger.exception("deferred work failed")
        self._chores.popleft()
