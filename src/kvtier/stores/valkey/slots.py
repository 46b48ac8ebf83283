"""The slots of a cluster: which one a key is in, and which node has it."""

from __future__ import annotations

import binascii
from collections.abc import Sequence

from kvtier.errors import RemoteProtocolError
from kvtier.stores.valkey.node import NodeAddress
from kvtier.stores.valkey.resp import Reply

NUM_SLOTS = 16384
_MAX_HOST_CHARS = 255


def slot_of(tag: bytes) -> int:
    """The slot of all keys with `{tag}` in them."""
    return binascii.crc_hqx(tag, 0) % NUM_SLOTS


def read_slots(reply: Reply, asked: NodeAddress) -> list[NodeAddress | None]:
    """The primary of each slot, from the answer to CLUSTER SLOTS of the node `asked`. Raises `RemoteProtocolError`."""
    if not isinstance(reply, list):
        raise RemoteProtocolError("the cluster did not say who has its slots")
    owners: list[NodeAddress | None] = [None] * NUM_SLOTS
    for part in reply:
        match part:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < NUM_SLOTS:
                owner = _node(host, port, asked)
                owners[first : last + 1] = [owner] * (last + 1 - first)
            case _:
                raise RemoteProtocolError("the cluster described its slots in a way that cannot be read")
    return owners


def read_redirection(sentence: str, asked: NodeAddress) -> tuple[int, NodeAddress]:
    """The slot and the node of "MOVED 3999 host:port", or of ASK. Raises `RemoteProtocolError`."""
    words = sentence.split(" ")
    if len(words) == 3 and words[1].isdecimal() and int(words[1]) < NUM_SLOTS:
        host, _, port = words[2].rpartition(":")
        if port.isdecimal():
            return int(words[1]), _node(host.encode(), int(port), asked)
    raise RemoteProtocolError("the cluster moved a slot to an unknown node")


def _node(host: Reply, port: int, asked: NodeAddress) -> NodeAddress:
    """A node that does not know its own name has that of the one which was asked."""
    name = host.decode(errors="replace") if isinstance(host, bytes) else ""
    if not 0 < port < 65536 or len(name) > _MAX_HOST_CHARS:
        raise RemoteProtocolError("the cluster named a node that cannot be")
    return NodeAddress(asked.host if name in ("", "?") else name, port)


def nodes_of(owners: Sequence[NodeAddress | None]) -> set[NodeAddress]:
    return {owner for owner in owners if owner is not None}
