"""Blocks in a cluster: their keys, their values, and how many are under way at once. Thread-safe.

Keys are ``kvt1:{<namespace>:<segment head>}:<hash>``, in hex: what stands in the braces decides the shard. A value is
the payload, four bytes of magic and an XXH3 over key and payload. Every key has a time to live, which a match renews.
The later a block stands in its prompt, the sooner it would go, whenever it was stored (`Segments`): with
``maxmemory-policy volatile-ttl`` a prompt loses its end before its beginning. Nothing is leased: what was matched may
be gone when it is fetched.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.errors import RemoteProtocolError, TierFull, TierRefused
from kvtier.memory.checksum import checksum_of
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.valkey.cluster import Cluster, NodeFailure, Share
from kvtier.stores.valkey.node import NodeAddress, NodeConnection, is_refusal
from kvtier.stores.valkey.resp import Reply, ReplyError, command, command_around
from kvtier.stores.valkey.segments import Segments
from kvtier.stores.valkey.shard import CONNECTIONS_PER_SHARD
from kvtier.stores.valkey.slots import slot_of

logger = logging.getLogger(__name__)

_MAGIC = b"kvt1"
_TRAILER = struct.Struct("<4sQ")
_IN_FLIGHT_BYTES = 64 << 20
_MAX_IN_FLIGHT = 16
_MANY_KEYS = 512
_SPLIT_BLOCKS = 8
_POSITION_MS = 1
_SCAN_KEYS = 1000
_TRIES_OVER = ("TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY")
"""Codes of a cluster that is just changing: the block is a miss now."""

OnLoss: TypeAlias = Callable[[str, int], None]


class ClusterBlocks:
    """The blocks of one namespace. Owns `cluster`."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: Namespace,
        block_bytes: int,
        *,
        ttl_s: float,
        segment_blocks: int,
        on_loss: OnLoss = lambda kind, count: None,
    ) -> None:
        """`on_loss` hears of what was lost: of which kind, and how often."""
        self._cluster = cluster
        self._namespace = namespace
        self._space = namespace.hex()
        self._block_bytes = block_bytes
        self._ttl_ms = int(ttl_s * 1000)
        self._segments = Segments(segment_blocks)
        self._log = LogLimit(logger)
        self._on_loss = on_loss

    def wait_until_known(self, timeout_s: float) -> bool:
        """As `Cluster.wait_until_known`."""
        return self._cluster.wait_until_known(timeout_s)

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All of a prompt's hashes so far, from its first block on; see `Segments`."""
        self._segments.learn(hashes)

    def ask(self, hashes: Sequence[BlockHash], timeout_s: float) -> list[bool | None]:
        """Which blocks are there; they live on from now. None where nobody could say."""
        self._segments.ask(hashes)
        return self.touch(hashes, timeout_s)

    def touch(self, hashes: Sequence[BlockHash], timeout_s: float) -> list[bool | None]:
        """As `ask`, but they live on from when their prompt was asked for."""
        names, slots = self.keys_of(hashes)
        expiries = self._expiries_ms(hashes)
        return self._ask_each(
            slots, lambda position: command(b"PEXPIREAT", names[position], expiries[position]), timeout_s
        )

    def contains(self, hashes: Sequence[BlockHash], timeout_s: float) -> list[bool | None]:
        """As `touch`, but nothing lives longer for it."""
        names, slots = self.keys_of(hashes)
        return self._ask_each(slots, lambda position: command(b"EXISTS", names[position]), timeout_s)

    def drop(self, hashes: Sequence[BlockHash], timeout_s: float) -> int:
        names, slots = self.keys_of(hashes)
        gone = self._ask_each(slots, lambda position: command(b"UNLINK", names[position]), timeout_s)
        return sum(map(bool, gone))

    def drop_all(self, timeout_s: float) -> int:
        """Of this namespace. Raises what the first node that fails does."""
        deadline = time.monotonic() + timeout_s
        num_gone = 0
        for address in self._cluster.nodes():
            cursor = b"0"
            while True:
                cursor, names = self._scan(address, cursor, deadline)
                num_gone += sum(map(bool, self._unlink(names, deadline)))
                if cursor == b"0":
                    break
        return num_gone

    def _scan(self, address: NodeAddress, cursor: bytes, deadline: float) -> tuple[bytes, list[bytes]]:
        """Some keys of this namespace that a node has, and where to go on."""
        pattern = b"kvt1:{%b:*" % self._space.encode()
        request = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_KEYS)
        match self._cluster.ask_node(address, request, deadline):
            case [bytes(following), [*names]]:
                return following, [name for name in names if isinstance(name, bytes)]
        raise RemoteProtocolError("the cluster listed its keys in a way that cannot be read")

    def _unlink(self, names: Sequence[bytes], deadline: float) -> list[bool | None]:
        slots = [slot_of(name.partition(b"{")[2].partition(b"}")[0]) for name in names]
        return self._ask_slots(slots, lambda position: command(b"UNLINK", names[position]), deadline)

    def get(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """Which blocks came whole; those that are damaged are deleted."""
        names, slots = self.keys_of(hashes)
        arrived = [False] * len(hashes)
        damaged: list[int] = []
        deadline = time.monotonic() + timeout_s

        def act(node: NodeConnection, share: Share) -> None:
            trailer = memoryview(bytearray(_TRAILER.size))
            asked = iter(share.positions)
            replies = iter(share.positions)
            for num_more in self._paced(len(share.positions)):
                request = b"".join(share.prefix + command(b"GET", names[next(asked)]) for _ in range(num_more))
                if request:
                    node.send([request], deadline)
                position = next(replies)
                reply = share.read(node, deadline, (into[position], trailer))
                if isinstance(reply, ReplyError):
                    self._refused(share, position, reply, node)
                elif reply is not None:
                    arrived[position] = self._is_whole(hashes[position], into[position], trailer, reply)
                    if not arrived[position]:
                        damaged.append(position)

        self._note(self._cluster.spread(slots, act, deadline, split_above=_SPLIT_BLOCKS))
        if damaged:
            self._on_loss("corrupt", len(damaged))
            self._log.warning("corrupt", "cluster: %d blocks were damaged, and are deleted", len(damaged))
            self.drop([hashes[position] for position in damaged], timeout_s)
        return arrived

    def put(self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """Which blocks were written. Raises `TierFull` if none was, for want of room."""
        names, slots = self.keys_of(hashes)
        expiries = self._expiries_ms(hashes)
        written = [False] * len(hashes)
        num_refused = 0
        deadline = time.monotonic() + timeout_s

        def parts(position: int) -> list[bytes | memoryview]:
            payload = blocks[position]
            trailer = _TRAILER.pack(_MAGIC, checksum_of(self._namespace, hashes[position], payload))
            before, after = command_around(
                (b"SET", names[position]), len(payload) + len(trailer), (b"PXAT", expiries[position])
            )
            return [before, payload, trailer + after]

        def act(node: NodeConnection, share: Share) -> None:
            nonlocal num_refused
            asked = iter(share.positions)
            replies = iter(share.positions)
            for num_more in self._paced(len(share.positions)):
                for _ in range(num_more):
                    node.send([share.prefix, *parts(next(asked))], deadline)
                position = next(replies)
                reply = share.read(node, deadline)
                if isinstance(reply, ReplyError):
                    if reply.code == "OOM":
                        num_refused += 1
                    else:
                        self._refused(share, position, reply, node)
                else:
                    written[position] = True

        self._note(self._cluster.spread(slots, act, deadline, split_above=_SPLIT_BLOCKS))
        if num_refused and not any(written):
            raise TierFull(f"no room for {num_refused} blocks: the cluster's memory is full, and it evicts nothing")
        return written

    def close(self) -> None:
        self._cluster.close()

    # --- private ---------------------------------------------------------------------------------------------------

    def _ask_each(self, slots: Sequence[int], request: Callable[[int], bytes], timeout_s: float) -> list[bool | None]:
        return self._ask_slots(slots, request, time.monotonic() + timeout_s)

    def _ask_slots(self, slots: Sequence[int], request: Callable[[int], bytes], deadline: float) -> list[bool | None]:
        """A short command for each slot, whose answer is a number: whether it is not 0."""
        answers: list[bool | None] = [None] * len(slots)

        def act(node: NodeConnection, share: Share) -> None:
            for first in range(0, len(share.positions), _MANY_KEYS):
                some = share.positions[first : first + _MANY_KEYS]
                node.send([b"".join(share.prefix + request(position) for position in some)], deadline)
                for position in some:
                    reply = share.read(node, deadline)
                    if isinstance(reply, ReplyError):
                        self._refused(share, position, reply, node)
                    elif isinstance(reply, int):
                        answers[position] = reply != 0
                    else:
                        raise RemoteProtocolError("the cluster answered a number with something else")

        self._note(self._cluster.spread(slots, act, deadline, split_above=len(slots)))
        return answers

    def _paced(self, count: int) -> Iterator[int]:
        """For each reply, how many more commands to send before it is read.

        As many are under way as the bound of a host allows, and at most 16: they are sent when half of them are done.
        """
        connections = CONNECTIONS_PER_SHARD * self._cluster.num_nodes
        most = max(1, min(_MAX_IN_FLIGHT, _IN_FLIGHT_BYTES // (self._block_bytes * connections)))
        num_sent = 0
        for num_read in range(count):
            num_more = 0
            if num_sent - num_read <= most // 2:
                num_more = min(count, num_read + most) - num_sent
                num_sent += num_more
            yield num_more

    def _refused(self, share: Share, position: int, error: ReplyError, node: NodeConnection) -> None:
        """A node refused a command: it sends elsewhere, is just changing, or does not know this user."""
        if self._cluster.redirected(share, position, error, node.address):
            return
        if is_refusal(error):
            raise TierRefused(f"the cluster's node {node.address} refused: {error.sentence}")
        self._on_loss("unavailable" if error.code in _TRIES_OVER else "refused", 1)
        self._log.warning(error.code, "cluster: node %s refused: %s", node.address, error.sentence)

    def _is_whole(self, block_hash: BlockHash, payload: memoryview, trailer: memoryview, reply: Reply) -> bool:
        if reply != self._block_bytes + _TRAILER.size:
            return False
        magic, checksum = _TRAILER.unpack(trailer)
        return bool(magic == _MAGIC and checksum == checksum_of(self._namespace, block_hash, payload))

    def _expiries_ms(self, hashes: Sequence[BlockHash]) -> list[bytes]:
        """When each block goes, in milliseconds since 1970; not before half of its time is over."""
        soonest_ms = int(time.time() * 1000) + self._ttl_ms // 2
        return [
            b"%d" % max(soonest_ms, place.asked_ms + self._ttl_ms - _POSITION_MS * place.position)
            for place in self._segments.places(hashes)
        ]

    def _note(self, failures: Sequence[NodeFailure]) -> None:
        for failure in failures:
            self._on_loss(failure.kind, 1)
            if failure.kind in (TierRefused.kind, "protocol"):  # of others the node has told
                self._log.warning(failure.kind, "cluster: %s", failure.sentence)

    def keys_of(self, hashes: Sequence[BlockHash]) -> tuple[list[bytes], list[int]]:
        """The key of each block and its slot."""
        names, slots = [], []
        slot_of_head: dict[BlockHash, tuple[str, int]] = {}
        for block_hash, place in zip(hashes, self._segments.places(hashes), strict=True):
            known = slot_of_head.get(place.head)
            if known is None:
                tag = f"{self._space}:{place.head.hex()}"
                known = slot_of_head[place.head] = tag, slot_of(tag.encode())
            names.append(f"kvt1:{{{known[0]}}}:{block_hash.hex()}".encode())
            slots.append(known[1])
        return names, slots
