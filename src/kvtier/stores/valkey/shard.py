"""The connections to one node of a cluster, and whether it is there. Thread-safe.

A node that does not answer costs its caller one deadline; from then on it is down, and calls fail at once until the
cluster's keeper finds that it answers again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from kvtier.errors import ProtocolError, TierError, TierTimeout, TierUnavailable
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.valkey.node import NodeAccess, NodeAddress, NodeConnection

logger = logging.getLogger(__name__)

CONNECTIONS_PER_SHARD = 2


class Shard:
    """At most two connections, opened when they are first needed."""

    def __init__(self, address: NodeAddress, access: NodeAccess) -> None:
        self.address = address
        self._access = access
        self._changed = threading.Condition()
        self._idle: list[NodeConnection] = []
        self._num_open = 0
        self._is_closed = False
        self._log = LogLimit(logger)
        self.is_down = False

    @contextlib.contextmanager
    def connection(self, deadline: float) -> Iterator[NodeConnection]:
        """A connection for the caller alone. A failure of it, and of nothing else, is the end of it.

        Raises `TierUnavailable` at once while the node is down, and `TierTimeout` at once after the deadline, for which
        the node is not to blame: the caller had waited for other nodes.
        """
        if not self.is_down and time.monotonic() >= deadline:
            raise TierTimeout(f"no time was left to ask the cluster's node {self.address}")
        connection = self._take(deadline)
        try:
            yield connection
        except (TierError, ProtocolError) as error:
            self._discard(connection)
            self.fail(error)
            raise
        except BaseException:
            self._discard(connection)  # a reply may be under way
            raise
        self._give_back(connection)

    def fail(self, error: Exception) -> None:
        with self._changed:
            if self.is_down or self._is_closed:
                return
            self.is_down = True
        self._log.warning("down", "cluster: %s; its blocks are misses until it is back", str(error))
        self._close_idle()

    def probe(self, timeout_s: float) -> bool:
        """Whether the node answers now: then it is not down any more."""
        deadline = time.monotonic() + timeout_s
        try:
            connection = NodeConnection(self.address, self._access, deadline)
        except (TierError, ProtocolError):
            return False
        connection.close()
        with self._changed:
            was_down, self.is_down = self.is_down, False
        if was_down:
            logger.info("cluster: node %s is back", self.address)
        return True

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._close_idle()

    def _take(self, deadline: float) -> NodeConnection:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self.is_down or self._is_closed or self._idle or self._num_open < CONNECTIONS_PER_SHARD,
                    max(0.0, deadline - time.monotonic()),
                )
                if self.is_down or self._is_closed:
                    raise TierUnavailable(f"the cluster's node {self.address} is down")
                if not self._idle:
                    if self._num_open >= CONNECTIONS_PER_SHARD:
                        raise TierTimeout(f"no connection to the cluster's node {self.address} was free in time")
                    self._num_open += 1
                    break
                connection = self._idle.pop()
            if not connection.has_ended():
                return connection
            self._discard(connection)
        try:
            return NodeConnection(self.address, self._access, deadline)
        except BaseException as error:
            with self._changed:
                self._num_open -= 1
                self._changed.notify()
            if isinstance(error, (TierError, ProtocolError)):
                self.fail(error)
            raise

    def _give_back(self, connection: NodeConnection) -> None:
        with self._changed:
            if not self._is_closed and not self.is_down:
                self._idle.append(connection)
                self._changed.notify()
                return
        self._discard(connection)

    def _discard(self, connection: NodeConnection) -> None:
        connection.close()
        with self._changed:
            self._num_open -= 1
            self._changed.notify()

    def _close_idle(self) -> None:
        with self._changed:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._discard(connection)
