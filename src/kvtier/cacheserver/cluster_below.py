"""A Valkey cluster below the server's memory and disk: blocks that hosts share.

A match looks there, without the catalog's lock, for blocks that the server lacks; readers load them into slots of the
arena that the match has reserved. A cluster has no leases: a block may be gone when it is read, and the client's lease
then ends before it. Blocks are written in the background: at their commit, or when they are reused or about to leave
the host. Blocks that a client has reserved, but not committed after a moment, are being computed: they are announced in
the cluster, and matches of other hosts wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from kvtier.blocks.block import Block, BlockState
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.bandwidth import Bandwidth
from kvtier.cacheserver.cluster_leavers import DiskLeavers
from kvtier.cacheserver.cluster_spaces import NOWHERE, ClusterSpaces, Elsewhere, FieldsOf
from kvtier.cacheserver.cluster_threads import ClusterReader, SharedBlockOwner
from kvtier.cacheserver.cluster_writer import ClusterWriter
from kvtier.cacheserver.namespaces import Hashes, MemoryBlock, MemorySpace
from kvtier.cacheserver.persistence import Disk
from kvtier.memory.mapped import MappedArena
from kvtier.stores.valkey.announcements import Announcer
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.described import DescribedNamespace

_FIRST_ANSWER_S = 2.0
_ANNOUNCE_AFTER_S = 0.02
"""Delay before an announcement: most reservations are filled at once, and need none."""

ShareOn: TypeAlias = Literal["commit", "reuse", "worth"]


class ClusterBelow:
    """One cluster. Threads start with `start` and end with `close`.

    Blocks are written at their commit ("commit"), or once they are reused or, without a disk, about to leave memory
    ("reuse"), or once they are reused or about to leave the disk ("worth"); at most `write_bytes_per_s`, if given.
    """

    is_there = True

    def __init__(
        self,
        config: ClusterConfig,
        arena: MappedArena,
        *,
        shares_on: ShareOn = "commit",
        write_bytes_per_s: int | None = None,
        is_last_place: bool = True,
    ) -> None:
        """Raises `ConfigError`. The cluster need not be up yet: it is used once it answers."""
        self._announcer = Announcer(_ANNOUNCE_AFTER_S) if config.compute_once else None
        self._spaces = ClusterSpaces(config, self._announcer)
        self._arena = arena
        self._shares_on = shares_on
        self._reader: ClusterReader | None = None
        bandwidth = Bandwidth(write_bytes_per_s)
        self._writer = ClusterWriter(self._spaces, arena, bandwidth, sweeps=is_last_place)
        self._leavers = DiskLeavers(self._spaces, bandwidth)

    def start(self, owner: SharedBlockOwner, disk: Disk, fields_of: FieldsOf) -> None:
        """The cluster has a moment to answer, so that the first match can hit."""
        self._spaces.fields_of = fields_of
        self._reader = ClusterReader(self._spaces, self._arena, owner)
        self._writer.start(owner)
        if self._shares_on == "worth":
            self._leavers.start(disk)
        self._spaces.wait_until_known(_FIRST_ANSWER_S)

    @property
    def segment_blocks(self) -> int:
        return self._spaces.config.segment

    # --- called without a lock: may wait for the cluster -------------------------------------------------------------

    def learn(self, space: MemorySpace, hashes: Hashes) -> None:
        """Learn the places of a prompt's blocks: `hashes` begin with its first block, or with one of known place."""
        self._spaces.of(space).places.complete(hashes)

    def follow(self, space: MemorySpace, hashes: Hashes) -> None:
        """Learn the places of consecutive blocks of a prompt, from any block of known place on."""
        self._spaces.of(space).places.follow(hashes)

    def place(
        self, space: MemorySpace, block_hash: BlockHash, head: BlockHash, position: int, before: BlockHash | None
    ) -> None:
        """Note a block's place in its prompt, as a client sent it, and possibly the block before."""
        self._spaces.of(space).places.place(block_hash, head, position, before)

    def announce(self, space: MemorySpace, blocks: Sequence[Block]) -> None:
        """Announce blocks that a client is about to write, if they go to the cluster at once ("commit").

        Otherwise it is not worth waiting for them.
        """
        if self._announcer is None or self._shares_on != "commit":
            return
        shared = [block for block in blocks if isinstance(block, MemoryBlock) and not space.is_table(block)]
        hashes = [block.hash for block in shared]

        def is_under_way(position: int) -> bool:
            block = shared[position]
            return block.state is BlockState.PENDING or block.is_sharing

        self._announcer.announce(self._spaces.of(space), hashes, is_under_way)

    def look(self, space: MemorySpace, prompt: Hashes, absent: Hashes) -> Elsewhere:
        """Which blocks `absent` from the server are in the cluster, up to the first that is not."""
        if space.is_awaited:  # no client that may write has given the block size
            return NOWHERE
        wanted = [block_hash for block_hash in absent if bytes(block_hash) != space.namespace]
        if wanted or not absent:
            self._spaces.use(space, prompt, wanted)
        return self._spaces.look(space, wanted) if wanted else NOWHERE

    def presence(self, namespace: Namespace, hashes: Hashes) -> list[bool | None]:
        """Which blocks of a prompt the cluster has, without using them; None where no node answered."""
        return self._spaces.presence(namespace, hashes)

    def described(self) -> list[DescribedNamespace]:
        """The namespaces of all hosts, as far as they have described them there."""
        return self._spaces.described()

    def drop(self, space: MemorySpace, hashes: Hashes) -> int:
        return self._spaces.drop(space, hashes)

    def losses(self) -> dict[str, int]:
        """Blocks lost and failures, by kind."""
        return self._spaces.losses()

    def close(self) -> None:
        """Write queued blocks for a few seconds at most, then end."""
        if self._announcer is not None:
            self._announcer.close()
        self._leavers.close()
        self._writer.close()
        if self._reader is not None:
            self._reader.close()
        self._spaces.close()

    # --- called by the catalog, under its lock: never blocks ---------------------------------------------------------

    def load(self, space: MemorySpace, blocks: Sequence[Block]) -> None:
        """Queue `blocks`, slots of the arena, to be filled from the cluster."""
        assert self._reader is not None
        self._reader.queue(space, [block for block in blocks if isinstance(block, MemoryBlock)])

    def note_committed(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> None:
        """Note that these blocks have just become READY."""
        if self._shares_on == "commit":
            self._writer.queue(space, blocks)

    def note_worth(self, space: MemorySpace, blocks: Sequence[Block]) -> None:
        """Note that these blocks were reused, or are about to be evicted."""
        self._writer.queue(space, blocks)

    def levels(self) -> dict[str, float]:
        written = self._writer.levels()
        written["cluster_written_blocks"] += self._leavers.num_written
        return {
            **written,
            "cluster_nodes_up": self._spaces.num_nodes_up,
            "cluster_found_blocks": self._spaces.num_found,
            "cluster_read_blocks": 0 if self._reader is None else self._reader.num_read,
        }


class NoCluster:
    """Stores nothing and finds nothing; see `ClusterBelow`."""

    is_there = False
    segment_blocks = 0

    def start(self, owner: SharedBlockOwner, disk: Disk, fields_of: FieldsOf) -> None: ...

    def close(self) -> None: ...

    def learn(self, space: MemorySpace, hashes: Hashes) -> None: ...

    def follow(self, space: MemorySpace, hashes: Hashes) -> None: ...

    def place(
        self, space: MemorySpace, block_hash: BlockHash, head: BlockHash, position: int, before: BlockHash | None
    ) -> None: ...

    def announce(self, space: MemorySpace, blocks: Sequence[Block]) -> None: ...

    def look(self, space: MemorySpace, prompt: Hashes, absent: Hashes) -> Elsewhere:
        return NOWHERE

    def presence(self, namespace: Namespace, hashes: Hashes) -> list[bool | None]:
        return [False] * len(hashes)

    def described(self) -> list[DescribedNamespace]:
        return []

    def drop(self, space: MemorySpace, hashes: Hashes) -> int:
        return 0

    def load(self, space: MemorySpace, blocks: Sequence[Block]) -> None: ...

    def note_committed(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> None: ...

    def note_worth(self, space: MemorySpace, blocks: Sequence[Block]) -> None: ...

    def levels(self) -> dict[str, float]:
        return {}

    def losses(self) -> dict[str, int]:
        return {}


SharedCluster: TypeAlias = ClusterBelow | NoCluster
NO_CLUSTER = NoCluster()
