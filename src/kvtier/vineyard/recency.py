"""When each token of a tree was last used, by any process of this host: a table in the server's own shared memory.

It is only a hint for pruning, so it has no lock: an entry that two processes write at once may be wrong until the token
is used again. An entry is the first eight bytes of a hash and a time; of the few places that an entry may take, the one
with the oldest use is overwritten. Any thread.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES, KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.client.connecting import connect
from kvtier.errors import TierError, TierFull
from kvtier.memory.lease import Lease
from kvtier.memory.mapped import MappedArena

_ENTRY_BYTES = 16
_MAX_TABLE_BYTES = 128 << 20
_MAX_PART_OF_MEMORY = 16
_PLACES = 8
_OPEN_S = 1.0
_PENDING_S = 0.001
_RETRY_S = 5.0


class Recency(Protocol):
    """Times of last use. Greater is later; 0 is unknown."""

    def touch(self, hashes: Sequence[BlockHash], used_at_ns: int) -> None:
        """Consecutive tokens were used at this time; the last of them counts as used first."""
        ...

    def times(self, hashes: Sequence[BlockHash]) -> list[int]: ...

    def close(self) -> None: ...


class LocalRecency:
    """Uses by this process only; for servers whose memory it has not mapped."""

    def __init__(self, capacity: int) -> None:
        self._max_entries = 4 * capacity
        self._lock = threading.Lock()
        self._times: dict[BlockHash, int] = {}

    def touch(self, hashes: Sequence[BlockHash], used_at_ns: int) -> None:
        with self._lock:
            for position, block_hash in enumerate(hashes):
                self._times.pop(block_hash, None)
                self._times[block_hash] = used_at_ns - position
            while len(self._times) > self._max_entries:
                del self._times[next(iter(self._times))]

    def times(self, hashes: Sequence[BlockHash]) -> list[int]:
        return [self._times.get(block_hash, 0) for block_hash in hashes]

    def close(self) -> None:
        pass


class SharedRecency:
    """The table of one tree, a block of a namespace beside the tree's; the first process that needs it creates it.

    Without it (the server is down, or full of leased blocks), nothing is noted or known; it is retried after some
    seconds, or at once on another server. A forked child does not use its parent's.
    """

    def __init__(
        self,
        address: str,
        tree: Namespace,
        slot_bytes: int,
        timeout_s: float,
        disk_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`slot_bytes` is a token's room in the server's memory and disk, and so determines how many there can be.

        `disk_bytes` may raise a `TierError`.
        """
        self._address = address
        self._tree = tree
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._disk_bytes = disk_bytes
        self._hash = BlockHash(b"")
        self._mask = 0
        self._lock = threading.Lock()
        self._tree_arena: MappedArena | None = None
        self._retry_at = 0.0
        self._client: CacheClient | None = None
        self._lease: Lease | None = None
        self._entries: memoryview | None = None

    def follow(self, tree_arena: MappedArena) -> None:
        """The tree is in this arena now. After a server's restart, it is another one, and so is the table."""
        with self._lock:
            if self._tree_arena is tree_arena and (self._entries is not None or time.monotonic() < self._retry_at):
                return
            self._let_go()
            self._tree_arena = tree_arena
            self._retry_at = time.monotonic() + _RETRY_S
            if not self._open(tree_arena.nbytes):
                self._let_go_of_client()

    def touch(self, hashes: Sequence[BlockHash], used_at_ns: int) -> None:
        with self._lock:
            if self._entries is not None:
                _write(self._entries, self._mask, hashes, used_at_ns)

    def times(self, hashes: Sequence[BlockHash]) -> list[int]:
        with self._lock:
            if self._entries is None:
                return [0] * len(hashes)
            return _read(self._entries, self._mask, hashes)

    def close(self) -> None:
        with self._lock:
            self._let_go()

    def _open(self, memory_bytes: int) -> bool:
        client = self._client = self._connect(memory_bytes)
        deadline = time.monotonic() + _OPEN_S
        while True:
            lease = client.match([self._hash])
            if lease.arena is not None:
                self._lease = lease
                self._entries = lease.arena.view(lease.offsets[0], client.layout.block_bytes).cast("Q")
                return True
            if lease.ended is MatchEnd.TIER_DOWN or time.monotonic() > deadline or not self._make(client):
                return False

    def _connect(self, memory_bytes: int) -> CacheClient:
        """Every process that shares the tree finds the same table: its size follows from the server's."""
        num_tokens = (memory_bytes + self._disk_bytes()) // self._slot_bytes
        nbytes = min(_MAX_TABLE_BYTES, memory_bytes // _MAX_PART_OF_MEMORY, 2 * _ENTRY_BYTES * num_tokens)
        nbytes = 1 << (max(SLOT_ALIGN_BYTES, nbytes) - 1).bit_length()
        namespace = Namespace(hashlib.sha256(b"times of last use" + nbytes.to_bytes(8, "little") + self._tree).digest())
        self._hash = BlockHash(namespace)
        self._mask = nbytes // _ENTRY_BYTES - 1
        return connect(
            self._address,
            layout=KvLayout(layers=1, kv_heads=1, head_dim=nbytes // 2, dtype="float8_e4m3fn", block_tokens=1),
            namespace=namespace,
            name="times of use",
            timeout_s=self._timeout_s,
            must_answer=False,
        )

    def _make(self, client: CacheClient) -> bool:
        """Create it with zeros, unless another process is creating it. False if there is no room."""
        try:
            with client.reserve([self._hash]) as reservation:
                if reservation.num_blocks:
                    reservation.fill([bytes(client.layout.block_bytes)])
                    reservation.commit()
                elif reservation.num_pending:
                    time.sleep(_PENDING_S)
        except (TierError, TierFull):
            return False
        return True

    def _let_go(self) -> None:
        if self._entries is not None:
            self._entries.release()
            self._entries = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._let_go_of_client()
        self._tree_arena = None

    def _let_go_of_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _write(entries: memoryview, mask: int, hashes: Sequence[BlockHash], used_at_ns: int) -> None:
    from_bytes = int.from_bytes
    for block_hash in hashes:
        name = from_bytes(block_hash[:8], "little")
        place = 2 * (name & mask)
        if entries[place] != name:
            place = _place_for(entries, mask, name)
            entries[place] = name
        entries[place + 1] = used_at_ns
        used_at_ns -= 1


def _place_for(entries: memoryview, mask: int, name: int) -> int:
    """The place of `name`, or else an empty one, or that of the entry with the oldest use."""
    coldest, coldest_time = 0, 1 << 64
    stride = name >> 32 | 1  # differs by name: otherwise neighbours would fill up together
    for step in range(_PLACES):
        place = 2 * ((name + step * stride) & mask)
        if entries[place] == name:
            return place
        if entries[place + 1] < coldest_time:
            coldest, coldest_time = place, entries[place + 1]
    return coldest


def _read(entries: memoryview, mask: int, hashes: Sequence[BlockHash]) -> list[int]:
    from_bytes = int.from_bytes
    times = []
    for block_hash in hashes:
        name = from_bytes(block_hash[:8], "little")
        place = 2 * (name & mask)
        if entries[place] != name:
            place = _place_for(entries, mask, name)
        times.append(entries[place + 1] if entries[place] == name else 0)
    return times
