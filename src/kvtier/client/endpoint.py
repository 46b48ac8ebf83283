"""One cache server from a client's side: everything needed to talk to it, and to continue when it is gone. Thread-safe.

The parts: `pool` has the connections, `mapping` the server's memory, `breaker` knows whether the server is down, and
`background` reconnects and does deferred work.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Iterator
from typing import TypeVar

from kvtier.client.background import Background
from kvtier.client.breaker import Breaker
from kvtier.client.mapping import ArenaMapping
from kvtier.client.options import ClientOptions
from kvtier.client.pool import AllBusy, ConnectionPool
from kvtier.client.prompt_places import PromptPlaces
from kvtier.client.server_connection import NO_KEYS, Keys, ServerConnection
from kvtier.errors import BlockCorrupt, ProtocolError, TierError, TierFull, TierRefused, TierTimeout, TierUnavailable
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.metrics import TierMetrics
from kvtier.transport.address import Address, UnixAddress
from kvtier.wire import messages as wire

logger = logging.getLogger(__name__)

_CONNECT_S = 2.0
_SLOWEST_BYTES_PER_S = 64e6
_Reply = TypeVar("_Reply", bound=wire.Reply)


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _forget_parent() -> None:
    for endpoint in list(_endpoints):
        endpoint.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)


class ServerCounts:
    """The metrics of one server; its address is their label."""

    def __init__(self, metrics: TierMetrics, address: str) -> None:
        self._metrics = metrics
        self._address = address
        self._log = LogLimit(logger)

    def found(self, num_hit: int, num_asked: int) -> None:
        self._metrics.hit_blocks.labels(tier=self._address).inc(num_hit)
        self.missed(num_asked - num_hit)

    def missed(self, num_blocks: int) -> None:
        self._metrics.missed_blocks.labels(tier=self._address).inc(num_blocks)

    def stored(self, num_blocks: int) -> None:
        self._metrics.stored_blocks.labels(tier=self._address).inc(num_blocks)

    def refused(self, num_blocks: int) -> None:
        self._metrics.refused_blocks.labels(tier=self._address).inc(num_blocks)

    def failed(self, error: Exception) -> None:
        """Count and log a failure that a call turns into a miss."""
        kind = error.kind if isinstance(error, TierError) else "protocol"
        self._metrics.failures.labels(tier=self._address, kind=kind).inc()
        # As text: an error kept by a log would keep the caller's buffers, which its traceback refers to.
        self._log.warning(kind, "cache server %s: %s", self._address, str(error))


class Endpoint:
    """Connections to `address`. `opening` is sent on each of them, unless it is None."""

    def __init__(
        self, address: Address, opening: wire.Open | None, options: ClientOptions, metrics: TierMetrics
    ) -> None:
        self.address = address
        self.is_local = isinstance(address, UnixAddress)
        self._server: wire.Welcome | None = None
        self.breaker = Breaker()
        self.counts = ServerCounts(metrics, str(address))
        self.mapping = ArenaMapping(address)
        self.places = PromptPlaces()
        self.background = Background(address, self.breaker, self._reconnect, self.counts.failed)
        self._pool = ConnectionPool(self._connect, options.max_connections)
        self._opening = opening
        keys = Keys(options.token, options.secret, options.tls())  # unreadable certificates are reported now
        self._keys = NO_KEYS if self.is_local else keys
        self._options = options
        self._holder = secrets.token_bytes(wire.HOLDER_BYTES)
        self._has_connected = False
        self.numbers = itertools.count(1)  # for leases and reservations
        _endpoints.add(self)

    @property
    def has_disk(self) -> bool:
        """As the server last said; False before a connection was made."""
        return self._server is not None and self._server.has_disk

    @property
    def memory_bytes(self) -> int:
        """Of the server on this host; 0 over TCP, and before a connection was made."""
        return 0 if self._server is None else self._server.arena_bytes

    def deadline(self, timeout_s: float | None = None, nbytes: int = 0) -> float:
        """The deadline of a call within `timeout_s`, or within this client's time-out plus time for `nbytes`."""
        if timeout_s is not None:
            return time.monotonic() + timeout_s
        return time.monotonic() + self._options.timeout_s + nbytes / _SLOWEST_BYTES_PER_S

    def call(self, request: wire.Request, reply_type: type[_Reply], deadline: float | None = None) -> _Reply:
        deadline = self.deadline() if deadline is None else deadline
        with self.connection(deadline) as connection:
            return connection.call(request, reply_type, deadline)

    @contextlib.contextmanager
    def connection(self, deadline: float) -> Iterator[ServerConnection]:
        """A connection for this thread alone. Errors inside end it; tier errors also count and move the breaker."""
        connection: ServerConnection | None = None
        is_usable = False
        try:
            if self.background.is_closed or self.breaker.is_open:
                self.background.check()
            connection = self._pool.take(deadline)
            yield connection
            is_usable = True
            self.breaker.succeed()
        except (TierRefused, TierFull) as error:
            is_usable = connection is not None
            if not is_usable:
                self._note(error)
            raise
        except (AllBusy, BlockCorrupt):
            raise  # our own mistake, or one block's: the server works
        except TierError as error:
            self._note(error)
            raise
        except ProtocolError as error:  # a server that breaks the protocol is unusable
            self._note(error)
            raise TierUnavailable(str(error)) from error
        finally:
            if connection is not None:
                self._pool.give_back(connection, is_usable)
                if self.background.chores:  # forgotten ones do not start by themselves
                    self.background.wake()

    def close(self) -> None:
        """Finish deferred work, give everything back and disconnect. Safe to call twice."""
        if self.background.is_closed:
            return
        with contextlib.suppress(TierError):
            self.background.wait_for_chores(time.monotonic() + _CONNECT_S)
        # Only then may the server give the memory to others.
        if self.mapping.stop_use(_CONNECT_S):
            self._say_goodbye()
        self.background.close()
        self._pool.close()
        self.mapping.close()

    def forget_parent(self) -> None:
        """In a forked child: the parent's connections, leases, thread and locks are not ours."""
        self.background.forget_parent()
        self._pool.forget_parent()
        self.mapping.forget_parent()
        self._has_connected = False
        self._holder = secrets.token_bytes(wire.HOLDER_BYTES)

    def _say_goodbye(self) -> None:
        """Tell a living server that none of its memory is used here any longer."""
        if not self.breaker.is_open and self._has_connected:
            with contextlib.suppress(TierError, ProtocolError, TierFull):
                self.call(wire.Bye(), wire.Done, time.monotonic() + _CONNECT_S)

    def _connect(self, deadline: float) -> ServerConnection:
        connection = ServerConnection(
            self.address, self._holder, deadline, self._keys, takes_declines=self._options.takes_declines
        )
        try:
            if self.is_local and self.mapping.attach(connection):
                self._pool.close_idle()
            self._has_connected = True
            self._server = connection.welcome
            self.places.meet(connection)
            if self._opening is not None:
                connection.space = connection.call(self._opening, wire.Opened, deadline).space
            return connection
        except BaseException:
            connection.close()
            raise

    def _reconnect(self) -> None:
        self._pool.add(time.monotonic() + _CONNECT_S)

    def _note(self, error: Exception) -> None:
        if self.background.is_closed or (isinstance(error, TierUnavailable) and self.breaker.is_open):
            return
        if self.breaker.fail(timed_out=isinstance(error, TierTimeout)):
            logger.warning("cache server down address=%s: %s", self.address, str(error))
            self.background.wake()
