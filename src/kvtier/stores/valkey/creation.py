"""A cluster made of Valkey servers that have none yet: slots for each of them, and all of them joined. Done once, by
an operator; replicas and other numbers of slots are for `valkey-cli`.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Sequence

from kvtier.errors import ConfigError, RemoteProtocolError, TierRefused, TierTimeout, TierUnavailable
from kvtier.stores.valkey.node import NodeAccess, NodeAddress, NodeConnection
from kvtier.stores.valkey.resp import command
from kvtier.stores.valkey.slots import NUM_SLOTS

_ANSWER_S = 10.0
_LOOK_S = 0.1


def create_cluster(addresses: Sequence[NodeAddress], access: NodeAccess, timeout_s: float) -> None:
    """All of `addresses` have an equal share of the slots, and know each other, when this returns.

    Nothing is changed if one of them does not answer, has cluster mode off, or is in a cluster already. Raises
    `KvtierError`.
    """
    if len(set(addresses)) < len(addresses):
        raise ConfigError("a node is named twice")
    with contextlib.ExitStack() as stack:
        nodes = []
        for address in addresses:
            connection = _connect(address, access, min(timeout_s, _ANSWER_S))
            stack.callback(connection.close)
            nodes.append(_NewNode(connection))
        for node in nodes:
            node.require_alone()
        for number, node in enumerate(nodes):
            node.take_slots(number, len(nodes))
        for other in nodes[1:]:
            nodes[0].meet(other)
        _wait_until_joined(nodes, timeout_s)


class _NewNode:
    """One of them."""

    def __init__(self, connection: NodeConnection) -> None:
        self.address = connection.address
        self._connection = connection

    def require_alone(self) -> None:
        info = self._info()
        if info.get("cluster_known_nodes") != 1 or info.get("cluster_slots_assigned") != 0:
            raise TierRefused(
                f"{self.address} is in a cluster already, or was in one: CLUSTER RESET on it makes it as new"
            )

    def take_slots(self, number: int, count: int) -> None:
        """The share with this `number` of `count`."""
        first, end = number * NUM_SLOTS // count, (number + 1) * NUM_SLOTS // count
        self._order(b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % first, b"%d" % (end - 1))
        self._order(b"CLUSTER", b"SET-CONFIG-EPOCH", b"%d" % (number + 1))

    def meet(self, other: _NewNode) -> None:
        where = [other.numeric_host(), b"%d" % other.address.port]
        if (bus_port := other.bus_port()) != b"0":
            where.append(bus_port)
        self._order(b"CLUSTER", b"MEET", *where)

    def is_joined(self, num_nodes: int) -> bool:
        """It knows all others, and that all slots are served."""
        info = self._info()
        counts = info.get("cluster_known_nodes"), info.get("cluster_size"), info.get("cluster_slots_ok")
        return counts == (num_nodes, num_nodes, NUM_SLOTS)

    def numeric_host(self) -> bytes:
        """Nodes take no names."""
        try:
            found = socket.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise TierUnavailable(f"{self.address} has no address: {error.strerror}") from error
        return str(found[0][4][0]).encode()

    def bus_port(self) -> bytes:
        """Where nodes speak to it, 0 if that is 10000 above its own port."""
        match self._ask(b"CONFIG", b"GET", b"cluster-port"):
            case [_, bytes(port)]:
                return port
        return b"0"

    def _info(self) -> dict[str, int]:
        """The numbers of CLUSTER INFO."""
        text = self._ask(b"CLUSTER", b"INFO")
        if not isinstance(text, bytes):
            raise RemoteProtocolError(f"{self.address} described its cluster in a way that cannot be read")
        return {name: int(count) for name, count in re.findall(r"(\w+):(\d{1,9})\r?\n", text.decode(errors="replace"))}

    def _order(self, *words: bytes) -> None:
        if self._ask(*words) != b"OK":
            raise RemoteProtocolError(f"{self.address} did not take {words[1].decode()}")

    def _ask(self, *words: bytes) -> object:
        return self._connection.ask(command(*words), _deadline())


def _connect(address: NodeAddress, access: NodeAccess, timeout_s: float) -> NodeConnection:
    """A server that was only just started does not listen yet: it has that long."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return NodeConnection(address, access, deadline)
        except TierUnavailable:
            if time.monotonic() + _LOOK_S > deadline:
                raise
        time.sleep(_LOOK_S)


def _wait_until_joined(nodes: Sequence[_NewNode], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    waiting = list(nodes)
    while waiting := [node for node in waiting if not node.is_joined(len(nodes))]:
        if time.monotonic() > until:
            names = ", ".join(str(node.address) for node in waiting)
            raise TierTimeout(
                f"{names} did not join within {timeout_s:g} s: "
                "do the hosts reach each other's cluster ports, 10000 above the nodes' own?"
            )
        time.sleep(_LOOK_S)


def _deadline() -> float:
    return time.monotonic() + _ANSWER_S
