"""Blocks in a cluster: their keys, their values, and how many are under way at once. Thread-safe.

Keys are ``kvt1:{<namespace>:<segment head>}:<hash>``, in hex: what stands in the braces decides the shard. A value is
the payload, four bytes of magic and an XXH3 over key and payload. Every key has a time to live, which a match renews.
The later a block stands in its prompt, the sooner it would go, whenever it was stored (`Segments`): with
``maxmemory-policy volatile-ttl`` a prompt loses its end before its beginning. Nothing is leased: what was matched may
be gone when it is fetched.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ProtocolError, RemoteProtocolError, TierError, TierFull, TierRefused
from kvtier.latency_guard import give_way
from kvtier.memory.checksum import checksum_of
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.valkey.cluster import Cluster, NodeFailure, NodeShare
from kvtier.stores.valkey.node import NodeAddress, NodeConnection, is_refusal
from kvtier.stores.valkey.resp import Reply, ReplyError, command, command_around
from kvtier.stores.valkey.segments import Segments
from kvtier.stores.valkey.slots import slot_of
from kvtier.stores.valkey.window import paced

logger = logging.getLogger(__name__)

_MAGIC = b"kvt1"
_COMPUTING = b":computing"
_WHO = b"%b:%d" % (socket.gethostname().encode()[:64], os.getpid())
"""For operators: who computes a block."""
_TRAILER = struct.Struct("<4sQ")
_MANY_KEYS = 512
_SPLIT_BLOCKS = 8
_POSITION_MS = 1
_SCAN_KEYS = 1000
_RENEWAL_S = 60.0
"""How often at most what is used from a host's own memory is renewed in the cluster."""
_RENEWALS_PER_LIFE = 4
_TRIES_OVER = ("TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY")
"""Codes of a cluster that is just changing: the block is a miss now."""

OnLoss: TypeAlias = Callable[[str, int], None]


class ClusterBlocks:
    """The blocks of one namespace. `close` closes the cluster, unless that is others' too."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: Namespace,
        block_bytes: int,
        *,
        ttl_s: float,
        segment_blocks: int,
        on_loss: OnLoss = lambda kind, count: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_loss` hears of what was lost: of which kind, and how often."""
        self._cluster = cluster
        self._namespace = namespace
        self._space = namespace.hex()
        self._block_bytes = block_bytes
        self._ttl_ms = int(ttl_s * 1000)
        self._clock = clock
        renewal_s = min(_RENEWAL_S, ttl_s / _RENEWALS_PER_LIFE)
        self._segments = Segments(segment_blocks, clock=clock, renewal_s=renewal_s)
        self._log = LogLimit(logger)
        self._on_loss = on_loss

    def wait_until_known(self, timeout_s: float) -> bool:
        """As `Cluster.wait_until_known`."""
        return self._cluster.wait_until_known(timeout_s)

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All of a prompt's hashes so far, from its first block on; see `Segments`."""
        self._segments.learn(hashes)

    @property
    def places(self) -> Segments:
        """The known places of blocks."""
        return self._segments

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    def ask(self, hashes: Sequence[BlockHash], timeout_s: float) -> list[bool | None]:
        """Which blocks are stored; their lifetime begins anew. None if the node did not answer."""
        return self._live_on(hashes, (), timeout_s)

    def touch(self, hashes: Sequence[BlockHash], timeout_s: float) -> list[bool | None]:
        """As `ask`, of blocks that another host may have asked for since: none lives shorter for it.

        Most of those that are offered are not there: they cost one command each.
        """
        deadline = time.monotonic() + timeout_s
        found = self.contains(hashes, timeout_s)
        there = [block_hash for block_hash, is_there in zip(hashes, found, strict=True) if is_there]
        if there:
            self.renew(there, max(0.0, deadline - time.monotonic()))
        return found

    def renew(self, hashes: Sequence[BlockHash], timeout_s: float) -> None:
        """As `touch`, of blocks that need not be there."""
        self._live_on(hashes, (b"GT",), timeout_s)

    def _live_on(self, hashes: Sequence[BlockHash], how: Sequence[bytes], timeout_s: float) -> list[bool | None]:
        names, slots = self.keys_of(hashes)
        expiries = self._expiries_ms(hashes)
        return self._ask_each(
            slots, lambda position: command(b"PEXPIREAT", names[position], expiries[position], *how), timeout_s
        )

    def contains(self, hashes: Sequence[BlockHash], timeout_s: float) -> list[bool | None]:
        """As `ask`, but nothing lives longer for it."""
        names, slots = self.keys_of(hashes)
        return self._ask_each(slots, lambda position: command(b"EXISTS", names[position]), timeout_s)

    def announce(self, hashes: Sequence[BlockHash], life_s: float, timeout_s: float) -> None:
        """Tell other hosts for `life_s` that these are being computed (`announcements`)."""
        names, slots = self.keys_of(hashes)
        life_ms = b"%d" % (life_s * 1000)
        self._ask_each(
            slots,
            lambda position: command(b"SET", names[position] + _COMPUTING, _WHO, b"PX", life_ms),
            timeout_s,
        )

    def withdraw(self, hashes: Sequence[BlockHash], timeout_s: float) -> None:
        """Withdraw announcements: no host should wait for these blocks."""
        names, slots = self.keys_of(hashes)
        self._ask_each(slots, lambda position: command(b"UNLINK", names[position] + _COMPUTING), timeout_s)

    def is_announced(self, block_hash: BlockHash, timeout_s: float) -> bool:
        """A host has said that it is computing this block."""
        (name,), slots = self.keys_of([block_hash])
        return self._ask_each(slots, lambda position: command(b"EXISTS", name + _COMPUTING), timeout_s) == [True]

    def drop(self, hashes: Sequence[BlockHash], timeout_s: float) -> int:
        names, slots = self.keys_of(hashes)
        gone = self._ask_each(slots, lambda position: command(b"UNLINK", names[position]), timeout_s)
        return sum(map(bool, gone))

    def drop_all(self, timeout_s: float) -> int:
        """Drop all blocks of this namespace. If nodes fail, raises the last error after all have been asked."""
        deadline = time.monotonic() + timeout_s
        num_gone = 0
        failure: TierError | ProtocolError | None = None
        for address in self._cluster.nodes():
            try:
                num_gone += self._drop_all_of(address, deadline)
            except (TierError, ProtocolError) as error:
                failure = error
        if failure is not None:
            raise failure
        return num_gone

    def _drop_all_of(self, address: NodeAddress, deadline: float) -> int:
        num_gone = 0
        cursor = b"0"
        while True:
            cursor, names = self._scan(address, cursor, deadline)
            num_gone += sum(map(bool, self._unlink(names, deadline)))
            if cursor == b"0":
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

        def act(node: NodeConnection, share: NodeShare) -> None:
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

    def put(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[memoryview],
        timeout_s: float,
        checksums: Sequence[int] | None = None,
    ) -> list[bool]:
        """Which blocks were written. Raises `TierFull` if none was, for want of room.

        With the `checksums` of their commit, a block that was altered since is a miss for its readers.
        """
        names, slots = self.keys_of(hashes)
        expiries = self._expiries_ms(hashes)
        written = [False] * len(hashes)
        num_refused = 0
        deadline = time.monotonic() + timeout_s

        def parts(position: int) -> list[bytes | memoryview]:
            payload = blocks[position]
            give_way()
            if checksums is None:
                checksum = checksum_of(self._namespace, hashes[position], payload)
            else:
                checksum = checksums[position]
            trailer = _TRAILER.pack(_MAGIC, checksum)
            before, after = command_around(
                (b"SET", names[position]), len(payload) + len(trailer), (b"PXAT", expiries[position])
            )
            return [before, payload, trailer + after]

        def act(node: NodeConnection, share: NodeShare) -> None:
            nonlocal num_refused
            asked = iter(share.positions)
            replies = iter(share.positions)
            for num_more in self._paced(len(share.positions)):
                more = [next(asked) for _ in range(num_more)]
                if more:  # in one system call
                    node.send([part for each in more for part in (share.prefix, *parts(each))], deadline)
                position = next(replies)
                reply = share.read(node, deadline)
                if isinstance(reply, ReplyError):
                    if reply.code == "OOM":
                        num_refused += 1
                    else:
                        self._refused(share, position, reply, node)
                else:
                    written[position] = True

        # One connection to each node: a second thread would send no faster, and cost a tenth more CPU time.
        self._note(self._cluster.spread(slots, act, deadline, split_above=len(slots)))
        if num_refused and not any(written):
            raise TierFull(f"no room for {num_refused} blocks: the cluster's memory is full, and it evicts nothing")
        return written

    def close(self) -> None:
        self._cluster.close()

    # --- private ---------------------------------------------------------------------------------------------------

    def _ask_each(self, slots: Sequence[int], request: Callable[[int], bytes], timeout_s: float) -> list[bool | None]:
        return self._ask_slots(slots, request, time.monotonic() + timeout_s)

    def _ask_slots(self, slots: Sequence[int], request: Callable[[int], bytes], deadline: float) -> list[bool | None]:
        """A short command for each slot, whose answer is OK or a number: whether it is not 0; None without one."""
        answers: list[bool | None] = [None] * len(slots)

        def act(node: NodeConnection, share: NodeShare) -> None:
            for first in range(0, len(share.positions), _MANY_KEYS):
                some = share.positions[first : first + _MANY_KEYS]
                node.send([b"".join(share.prefix + request(position) for position in some)], deadline)
                for position in some:
                    reply = share.read(node, deadline)
                    if isinstance(reply, ReplyError):
                        if reply.code != "OOM":  # no room for an announcement: others compute as well
                            self._refused(share, position, reply, node)
                    elif isinstance(reply, int) or reply == b"OK":
                        answers[position] = reply != 0
                    else:
                        raise RemoteProtocolError("the cluster answered a number with something else")

        self._note(self._cluster.spread(slots, act, deadline, split_above=len(slots)))
        return answers

    def _paced(self, count: int) -> Iterator[int]:
        return paced(count, self._block_bytes, lambda: self._cluster.num_busy)

    def _refused(self, share: NodeShare, position: int, error: ReplyError, node: NodeConnection) -> None:
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
        soonest_ms = int(self._clock() * 1000) + self._ttl_ms // 2
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
