"""What the server holds and who holds on to it: namespaces, leases, reservations, over one block pool.

Thread-safe: one short lock around everything, never held over I/O. A *holder* is a client, whatever number of
connections it has. What a local holder leases lies in memory it has mapped, so only the holder itself, or the end of
its process, gives it back; what a remote holder leases it only names, so a clock may end it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from kvtier.blocks.ghosts import Ghosts
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES, slot_bytes_of
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.policies import LruPolicy
from kvtier.blocks.pool import ENDED, Block, BlockPool, BlockState, Grant, PrefixIndex, Presence
from kvtier.cacheserver.disk_aware_lru import DiskAwareLru
from kvtier.cacheserver.namespace_descriptions import NamespaceDescriptions
from kvtier.cacheserver.persistence import Load, MemoryBlock, Persistence, SpaceLike
from kvtier.errors import TierRefused, TierUnavailable
from kvtier.sizes import format_size
from kvtier.wire.messages import (
    LISTED_DISK,
    LISTED_EVICTED,
    LISTED_MEMORY,
    LISTED_PENDING,
    LISTED_PINNED,
    match_end_of,
)

_MAX_ENDED_NUMBERS = 4096
_ROOM_S = 0.5

StoreOn: TypeAlias = Literal["commit", "reuse"]


class Space:
    """One namespace's blocks. `num_users` connections have it open."""

    def __init__(self, number: int, namespace: Namespace, name: str, block_bytes: int, block_tokens: int) -> None:
        self.number = number
        self.namespace = namespace
        self.name = name
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.index = PrefixIndex(slot_bytes_of(block_bytes) // SLOT_ALIGN_BYTES)
        self.num_users = 0


@dataclass(slots=True)
class _Hold:
    """One lease or reservation."""

    blocks: list[Block]
    space: Space
    touched_at: float
    num_ready: int = 0


@dataclass(slots=True, eq=False)
class Holder:
    """A client: what it leases and reserves, under numbers of its own choice."""

    id: bytes
    pid: int | None
    num_connections: int = 0
    leases: dict[int, _Hold] = field(default_factory=dict)
    reservations: dict[int, _Hold] = field(default_factory=dict)
    held_units: int = 0
    ended_numbers: dict[int, None] = field(default_factory=dict)
    is_gone: bool = False

    @property
    def is_local(self) -> bool:
        return self.pid is not None


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """The blocks of a lease; the first `num_ready` are in memory, the others on their way.

    `num_stored` more follow on disk or in memory, which a lazy lease does not hold.
    """

    blocks: list[Block]
    ended: MatchEnd
    num_ready: int
    num_stored: int = 0


class Catalog:
    """All operations on what is cached. Offsets are `block.start * SLOT_ALIGN_BYTES`."""

    def __init__(
        self,
        memory_bytes: int,
        *,
        leased_bytes_per_client: int,
        pinned_bytes: int,
        lease_timeout_s: float,
        persistence: Persistence | None = None,
        stores_on: StoreOn = "commit",
        keeps_stored: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `persistence`, blocks are also on disk: written on commit, or once they are used again ("reuse").

        Without `keeps_stored`, what is safe on disk leaves memory as soon as nobody holds it.
        """
        self._lock = threading.Lock()
        self._loaded = threading.Condition(self._lock)
        self._awaited: dict[Block, list[threading.Event]] = {}
        """Blocks that are being read, and who waits for just them."""
        self._persistence = persistence
        self._stores_on = stores_on
        self._keeps_stored = keeps_stored
        self._ghosts = Ghosts()
        self._known_fields = NamespaceDescriptions()
        self._pool = BlockPool(
            memory_bytes // SLOT_ALIGN_BYTES,
            LruPolicy() if persistence is None else DiskAwareLru(evicts_unsafe=keeps_stored),
            make=MemoryBlock,
            on_evict=self._note_evicted,
        )
        self._held_units_per_client = leased_bytes_per_client // SLOT_ALIGN_BYTES
        self._max_pinned_units = pinned_bytes // SLOT_ALIGN_BYTES
        self._lease_timeout_s = lease_timeout_s
        self._clock = clock
        self._spaces: dict[int, Space] = {}
        self._space_numbers: dict[Namespace, int] = {}
        self._last_space_number = 0
        self._holders: dict[bytes, Holder] = {}
        self._num_dropping = 0

    # --- clients and namespaces ------------------------------------------------------------------------------------

    def join(self, holder_id: bytes, pid: int | None) -> Holder:
        """A connection of the client `holder_id`. Raises `TierRefused` when another process has that id."""
        with self._lock:
            holder = self._holders.get(holder_id)
            if holder is None:
                holder = self._holders[holder_id] = Holder(holder_id, pid)
            elif holder.pid != pid:
                raise TierRefused("this client's id belongs to another process; connect anew after a fork")
            holder.num_connections += 1
            return holder

    def leave(self, holder: Holder) -> None:
        """A connection ended. A holder without connections is gone, unless it is local and holds something."""
        with self._lock:
            holder.num_connections -= 1
            holds_nothing = not holder.leases and not holder.reservations
            if not holder.num_connections and (holds_nothing or not holder.is_local):
                self._end(holder)

    def end(self, holder: Holder) -> None:
        """The client said good-bye, or its process is gone: everything it held comes back."""
        with self._lock:
            self._end(holder)

    def open(self, namespace: Namespace, name: str, block_bytes: int, block_tokens: int, fields: str = "") -> Space:
        """Use a namespace; `close` it once per call. Raises `TierRefused` for another block size than it has.

        `fields` is the JSON of what the namespace covers, for whoever looks at it; empty when it is not known.
        """
        with self._lock:
            number = self._space_numbers.get(namespace)
            if number is None:
                if slot_bytes_of(block_bytes) > self._pool.num_units * SLOT_ALIGN_BYTES:
                    raise TierRefused(
                        f"a block of {format_size(block_bytes)} does not fit into this server's "
                        f"{format_size(self._pool.num_units * SLOT_ALIGN_BYTES)}"
                    )
                self._last_space_number += 1
                number = self._space_numbers[namespace] = self._last_space_number
                self._spaces[number] = Space(number, namespace, name, block_bytes, block_tokens)
            space = self._spaces[number]
            if space.block_bytes != block_bytes:
                raise TierRefused(
                    f"namespace {namespace.hex()[:12]} ({space.name or 'unnamed'}) has blocks of {space.block_bytes} "
                    f"bytes here; this client says {block_bytes}"
                )
            space.num_users += 1
            if fields:
                self._known_fields.keep(namespace, fields)
            return space

    def close(self, space: Space) -> None:
        with self._lock:
            space.num_users -= 1
            self._forget_if_empty(space)

    # --- reading ---------------------------------------------------------------------------------------------------

    def lease(
        self, holder: Holder, number: int, space: Space, hashes: Sequence[BlockHash], *, is_lazy: bool = False
    ) -> LeaseOutcome:
        """Lease the longest cached prefix of `hashes` to `holder` under `number`; if lazy, what of it is in memory."""
        with self._lock:
            self._check_number(holder, number)
            max_blocks = self._blocks_left(holder, space)
            num_stored = 0
            if is_lazy and self._persistence is not None:
                blocks, ended, num_stored = self._find_lazily(space, hashes, max_blocks)
            else:
                blocks, ended = self._find(space, hashes, max_blocks)
            if ended is MatchEnd.ALL and len(blocks) + num_stored < len(hashes):
                ended = MatchEnd.LIMIT
            if blocks:
                self._hold(holder, holder.leases, number, _Hold(blocks, space, self._clock()))
            num_ready = len(blocks) if self._persistence is None else _num_ready(blocks)
            return LeaseOutcome(blocks, ended, num_ready, num_stored)

    def await_lease(self, holder: Holder, number: int, count: int, timeout_s: float) -> int | None:
        """Wait until the first `count` blocks of a lease are in memory. Returns how many leading ones are, or more."""
        with self._lock:
            hold = holder.leases.get(number)
            if hold is None:
                return None
            hold.num_ready = self._await(hold.blocks, count, timeout_s, hold.num_ready)
            return hold.num_ready

    def await_blocks(self, blocks: Sequence[Block], timeout_s: float) -> int:
        """As `await_lease`, for blocks from `borrow`."""
        with self._lock:
            return self._await(blocks, len(blocks), timeout_s, 0)

    def release(self, holder: Holder, number: int) -> None:
        with self._lock:
            self._drop_hold(holder, holder.leases, number)

    def borrow(self, space: Space, hashes: Sequence[BlockHash]) -> list[Block]:
        """Reference the longest cached prefix while it is sent; `give_back` ends that. Some may yet be loading."""
        with self._lock:
            return self._find(space, hashes, self._pool.num_units // space.index.block_units)[0]

    def give_back(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            self._free(blocks)

    def contains(self, space: Space, hashes: Sequence[BlockHash]) -> bytes:
        with self._lock:
            flags = [space.index.presence(block_hash) is Presence.READY for block_hash in hashes]
            if self._persistence is not None:
                stored = self._persistence.contains(space, hashes)
                flags = [here or there for here, there in zip(flags, stored, strict=True)]
            return bytes(flags)

    def presence(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> bytes:
        """Where each of `hashes` is, or why it is not there: LISTED_ flags. Uses nothing, opens nothing."""
        with self._lock:
            number = self._space_numbers.get(namespace)
            blocks = {} if number is None else self._spaces[number].index.blocks
            persistence = self._persistence
            flags = [0] * len(hashes) if persistence is None else persistence.presence(namespace, hashes)
            for position, block_hash in enumerate(hashes):
                block = blocks.get(block_hash)
                if block is None:
                    if block_hash in self._ghosts and not flags[position] & LISTED_DISK:
                        flags[position] = LISTED_EVICTED
                elif block.is_ready:
                    on_disk = flags[position] & LISTED_DISK
                    flags[position] = on_disk | LISTED_MEMORY | (LISTED_PINNED if block.is_pinned else 0)
                elif block.state is BlockState.PENDING:
                    flags[position] = LISTED_PENDING
            return bytes(flags)

    # --- writing ---------------------------------------------------------------------------------------------------

    def reserve(self, holder: Holder, number: int, space: Space, hashes: Sequence[BlockHash]) -> tuple[Grant, str]:
        """Room for the absent ones of `hashes`, and why some got none."""
        with self._lock:
            self._check_number(holder, number)
            max_blocks = self._blocks_left(holder, space)
            absent, positions = self._not_only_stored(space, hashes)
            if not self._keeps_stored:
                self._wait_for_room(min(len(absent), max_blocks) * space.index.block_units)
            grant = self._pool.reserve(space.index, absent, max_blocks)
            grant = replace(
                grant,
                positions=[positions[position] for position in grant.positions],
                num_ready=grant.num_ready + len(hashes) - len(absent),
            )
            if grant.blocks:
                self._hold(holder, holder.reservations, number, _Hold(grant.blocks, space, self._clock()))
            return grant, self._reason(len(grant.blocks) == max_blocks) if grant.num_refused else ""

    def fill(self, holder: Holder, number: int, first: int, count: int) -> tuple[Space, list[Block]] | None:
        """Blocks of a reservation to receive bytes into, with a reference of their own.

        None when the reservation has ended or some of them are committed already.
        """
        with self._lock:
            hold = holder.reservations.get(number)
            if hold is None:
                return None
            blocks = _range_of(hold, first, count)
            if any(block.is_ready for block in blocks):  # others may be reading them
                return None
            hold.touched_at = self._clock()
            self._pool.reference(blocks)
            return hold.space, blocks

    def commit_filled(self, space: Space, blocks: Sequence[Block]) -> int:
        """The bytes of blocks from `fill` have arrived. Ends their extra reference."""
        with self._lock:
            num_committed = self._commit(space, blocks)
            self._free(blocks)
            return num_committed

    def commit(self, holder: Holder, number: int, first: int, count: int) -> int | None:
        """A local client has written these blocks of its reservation itself; None when it has ended."""
        with self._lock:
            hold = holder.reservations.get(number)
            if hold is None:
                return None
            return self._commit(hold.space, _range_of(hold, first, count))

    def close_reservation(self, holder: Holder, number: int) -> None:
        with self._lock:
            self._drop_hold(holder, holder.reservations, number)

    # --- keeping and forgetting ------------------------------------------------------------------------------------

    def pin(self, space: Space, hashes: Sequence[BlockHash]) -> int:
        """Raises `TierRefused` when the share for pinned blocks is used up; the leading ones are pinned then."""
        with self._lock:
            num_ready = sum(space.index.presence(block_hash) is Presence.READY for block_hash in hashes)
            num_pinned = self._pool.pin(space.index, hashes, self._max_pinned_units)
            num_stored = 0 if self._persistence is None else self._persistence.pin(space, hashes, keep=True)
        if num_pinned < num_ready:
            limit = format_size(self._max_pinned_units * SLOT_ALIGN_BYTES)
            raise TierRefused(f"pinned {num_pinned} of {num_ready} blocks: at most {limit} may be pinned")
        return max(num_pinned, num_stored)

    def unpin(self, space: Space, hashes: Sequence[BlockHash]) -> int:
        with self._lock:
            num_unpinned = self._pool.unpin(space.index, hashes)
            num_stored = 0 if self._persistence is None else self._persistence.pin(space, hashes, keep=False)
        return max(num_unpinned, num_stored)

    def drop(self, space: Space, hashes: Sequence[BlockHash]) -> int:
        """Forget `hashes`, or all of the namespace when there are none, in memory and on disk."""
        with self._lock:
            wanted = list(hashes) or list(space.index.blocks)
            found = [block for block_hash in wanted if (block := space.index.blocks.get(block_hash)) is not None]
            num_dropped = self._pool.drop(space.index, wanted)
            for block_hash in wanted:
                self._ghosts.discard(block_hash)
            if self._persistence is None:
                return num_dropped
            self._num_dropping += 1
            try:  # what is being written to disk right now must be there before it can be dropped there
                self._loaded.wait_for(lambda: not any(block.is_held for block in found), _ROOM_S)
            finally:
                self._num_dropping -= 1
        num_dropped = max(num_dropped, self._persistence.drop(space, hashes or None))
        with self._lock:  # whoever has set one of them again meanwhile wants it on disk
            again = [block for block_hash in wanted if (block := space.index.blocks.get(block_hash)) is not None]
            for block in again:
                assert isinstance(block, MemoryBlock)
                if block.is_stored and block.is_ready and not block.is_queued:
                    block.is_stored = False
                    self._persistence.queue(space, [block])
        return num_dropped

    def list_blocks(self, space: Space, first: int, count: int) -> tuple[list[BlockHash], bytes, bool]:
        """At most `count` hashes of a namespace from a place on, their LISTED_ flags, and whether none follow.

        What comes or goes between two calls may be missed by who lists part by part.
        """
        with self._lock:
            blocks: Iterable[Block] = space.index.blocks.values()
            num_blocks = len(space.index)
            if self._persistence is None:
                blocks = itertools.islice(blocks, first, first + count)
            flags = {
                block.hash: LISTED_MEMORY | (LISTED_PINNED if block.is_pinned else 0)
                for block in blocks
                if block.is_ready
            }
            if self._persistence is None:
                return list(flags), bytes(flags.values()), first + count >= num_blocks
            stored = self._persistence.blocks(space)
        for block_hash, is_pinned in stored:
            flags[block_hash] = flags.get(block_hash, 0) | LISTED_DISK | (LISTED_PINNED if is_pinned else 0)
        part = list(flags.items())[first : first + count]
        return [block_hash for block_hash, _ in part], bytes(each for _, each in part), first + count >= len(flags)

    def verify(self, space: Space, hashes: Sequence[BlockHash]) -> bytes:
        if self._persistence is None:
            raise TierRefused("this server has no disk to verify")
        try:
            return bytes(self._persistence.verify(space, hashes))
        except TierUnavailable as error:
            raise TierRefused(str(error)) from error

    def flush(self, timeout_s: float) -> None:
        """When it returns, what was committed before is on disk, if there is one. Raises `TierError` if it cannot."""
        if self._persistence is not None:
            self._persistence.flush(timeout_s)

    # --- the disk's threads ----------------------------------------------------------------------------------------

    def begin_storing(self, blocks: Sequence[MemoryBlock]) -> list[MemoryBlock]:
        with self._lock:
            held = []
            for block in blocks:
                if block.is_ready:
                    self._pool.hold(block)
                    held.append(block)
                else:
                    block.is_queued = False
            return held

    def refuse(self, blocks: Sequence[MemoryBlock]) -> None:
        with self._lock:
            if not self._keeps_stored:  # it would stay in memory for ever
                for block in blocks:
                    if block.is_ready:
                        self._pool.drop(block.index, [block.hash])
                        self._ghosts.add(block.hash)

    def end_storing(self, blocks: Sequence[MemoryBlock], stored: Sequence[bool]) -> None:
        with self._lock:
            for block, is_stored in zip(blocks, stored, strict=True):
                block.is_queued = False  # not before: two writers must never hold one block
                block.is_stored = block.is_stored or is_stored
                self._pool.let_go(block)
            self._leave_memory(blocks)
            if not self._keeps_stored or self._num_dropping:
                self._loaded.notify_all()

    def end_loading(self, blocks: Sequence[MemoryBlock], arrived: Sequence[bool]) -> None:
        with self._lock:
            for block, has_arrived in zip(blocks, arrived, strict=True):
                if has_arrived:
                    block.is_stored = True
                    self._pool.commit([block])
                else:
                    self._pool.fail(block)
                    self._ghosts.discard(block.hash)  # it was stored again since, and is lost now
            for block in blocks:
                for event in self._awaited.pop(block, ()):
                    event.set()
            self._free(blocks)
            self._loaded.notify_all()

    def unstored(self) -> list[tuple[SpaceLike, MemoryBlock]]:
        """After an outage: what is in memory and was on disk, or was to be. Nothing is on the disk for sure now."""
        with self._lock:
            found: list[tuple[SpaceLike, MemoryBlock]] = []
            for space in self._spaces.values():
                for block in space.index.blocks.values():
                    assert isinstance(block, MemoryBlock)
                    is_wanted = self._stores_on == "commit" or block.is_stored or block.was_reused
                    block.is_stored = False
                    if block.is_ready and is_wanted and not block.is_queued:
                        found.append((space, block))
            return found

    # --- time and numbers ------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """End what remote holders have held too long without a sign. Returns how many leases and reservations.

        Also forgets namespaces that nobody uses and of which eviction has left nothing.
        """
        with self._lock:
            late = self._clock() - self._lease_timeout_s
            num_ended = 0
            for holder in self._holders.values():
                if holder.is_local:
                    continue
                for holds in (holder.leases, holder.reservations):
                    for number in [number for number, hold in holds.items() if hold.touched_at < late]:
                        self._drop_hold(holder, holds, number)
                        num_ended += 1
            for space in list(self._spaces.values()):
                self._forget_if_empty(space)
            stored = [] if self._persistence is None else self._persistence.spaces()
            self._known_fields.forget_all_but({*self._space_numbers, *(space.namespace for space in stored)})
            return num_ended

    def levels(self) -> dict[str, float]:
        """The numbers that go up and down, and the count of evictions."""
        with self._lock:
            pool = self._pool
            holders = self._holders.values()
            disk = {} if self._persistence is None else self._persistence.levels()
            return {
                **disk,
                "memory_bytes": pool.num_units * SLOT_ALIGN_BYTES,
                "used_bytes": (pool.num_units - pool.free_units) * SLOT_ALIGN_BYTES,
                "free_bytes": pool.free_units * SLOT_ALIGN_BYTES,
                "held_bytes": pool.referenced_units * SLOT_ALIGN_BYTES,
                "pinned_bytes": pool.pinned_units * SLOT_ALIGN_BYTES,
                "blocks": sum(len(space.index) for space in self._spaces.values()),
                "namespaces": len(self._spaces),
                "clients": len(holders),
                "leases": sum(len(holder.leases) for holder in holders),
                "reservations": sum(len(holder.reservations) for holder in holders),
                "evicted_blocks": pool.num_evicted,
            }

    def spaces(self) -> list[dict[str, object]]:
        """Every namespace in memory or on disk, for people."""
        with self._lock:
            found: dict[Namespace, dict[str, object]] = {
                space.namespace: {
                    "namespace": space.namespace.hex(),
                    "name": space.name,
                    "block_bytes": space.block_bytes,
                    "block_tokens": space.block_tokens,
                    "blocks": len(space.index),
                    "used_bytes": len(space.index) * slot_bytes_of(space.block_bytes),
                    "connections": space.num_users,
                    "disk_blocks": 0,
                }
                for space in self._spaces.values()
            }
            for stored in [] if self._persistence is None else self._persistence.spaces():
                known = found.setdefault(
                    stored.namespace,
                    {
                        "namespace": stored.namespace.hex(),
                        "name": stored.name,
                        "block_bytes": stored.block_bytes,
                        "block_tokens": stored.block_tokens,
                        "blocks": 0,
                        "used_bytes": 0,
                        "connections": 0,
                    },
                )
                known["disk_blocks"] = len(stored.index)
            return list(found.values())

    def spaces_with_fields(self) -> list[dict[str, object]]:
        """As `spaces`, each with what its namespace covers, or None where nobody has said it."""
        spaces = self.spaces()
        with self._lock:
            for space in spaces:
                space["fields"] = self._known_fields.get(Namespace(bytes.fromhex(str(space["namespace"]))))
        return spaces

    # --- private, under the lock -----------------------------------------------------------------------------------

    def _find(self, space: Space, hashes: Sequence[BlockHash], max_blocks: int) -> tuple[list[Block], MatchEnd]:
        """Reference the longest prefix in memory and on disk; what is on disk begins to load."""
        match = self._pool.match(space.index, hashes, max_blocks)
        blocks, ended = match.blocks, match.ended
        self._store_reused(space, blocks)
        num_in_memory = len(blocks)
        while self._persistence is not None and ended is Presence.MISS and len(blocks) < max_blocks:
            loading = self._load(space, hashes[len(blocks) : max_blocks])
            if not loading:
                break
            blocks += loading
            more = self._pool.match(space.index, hashes[len(blocks) :], max_blocks - len(blocks))
            blocks += more.blocks
            ended = more.ended
        if self._persistence is not None and (num_in_memory or len(blocks) > 1):
            # A block that is loaded counts as used on disk by itself, but several in no certain order.
            self._persistence.note_used(space, hashes[: len(blocks)])
        if ended is Presence.MISS:
            return blocks, self._why_absent(space, hashes[len(blocks)])
        return blocks, ENDED[ended]

    def _find_lazily(
        self, space: Space, hashes: Sequence[BlockHash], max_blocks: int
    ) -> tuple[list[Block], MatchEnd, int]:
        """Reference the longest prefix in memory, and count what follows it on disk or in memory."""
        assert self._persistence is not None
        match = self._pool.match(space.index, hashes, max_blocks)
        self._store_reused(space, match.blocks)
        if match.blocks:
            self._persistence.note_used(space, hashes[: len(match.blocks)])
        if match.ended is not Presence.MISS:
            return match.blocks, ENDED[match.ended], 0
        rest = hashes[len(match.blocks) :]
        stored = self._persistence.contains(space, rest)
        num_stored = 0
        for block_hash, is_stored in zip(rest, stored, strict=True):
            presence = space.index.presence(block_hash)
            if presence is Presence.PENDING:
                return match.blocks, MatchEnd.PENDING, num_stored
            if presence is Presence.MISS and not is_stored:
                return match.blocks, self._why_absent(space, block_hash), num_stored
            num_stored += 1
        return match.blocks, MatchEnd.ALL, num_stored

    def _why_absent(self, space: Space, block_hash: BlockHash) -> MatchEnd:
        """What a lease says of a hash that is not in memory."""
        flags = 0 if self._persistence is None else self._persistence.presence(space.namespace, [block_hash])[0]
        if flags & LISTED_DISK:
            return MatchEnd.LIMIT  # it is on disk, and there is no more memory to load it into
        if block_hash in self._ghosts:
            return MatchEnd.EVICTED  # before it was stored: a disk that is down does not have it either
        return match_end_of(flags)

    def _note_evicted(self, block: Block) -> None:
        assert isinstance(block, MemoryBlock)
        if not block.is_stored:  # else the disk knows what becomes of it
            self._ghosts.add(block.hash)

    def _load(self, space: Space, hashes: Sequence[BlockHash]) -> list[Block]:
        """Slots for the leading hashes that are on disk and not in memory, referenced and being filled."""
        assert self._persistence is not None
        present = space.index.blocks
        absent = next((position for position, block_hash in enumerate(hashes) if block_hash in present), len(hashes))
        found = self._persistence.match(space, hashes[:absent])
        if found is None:
            return []
        store, stored = found
        seen: set[BlockHash] = set()
        for position, origin in enumerate(stored):  # a run ends where it repeats itself
            if origin.hash in seen:
                store.free(stored[position:])
                stored = stored[:position]
                break
            seen.add(origin.hash)
        grant = self._pool.reserve(space.index, [origin.hash for origin in stored], state=BlockState.LOADING)
        loads = []
        for block, position in zip(grant.blocks, grant.positions, strict=True):
            assert isinstance(block, MemoryBlock)
            assert block.hash == stored[position].hash
            loads.append(Load(block, stored[position], store))
        store.free(stored[len(loads) :])
        self._pool.reference(grant.blocks)  # one for whoever asked, one for the reader
        self._persistence.load(loads)
        return grant.blocks

    def _wait_for_room(self, units: int) -> None:
        """Where memory is only a passage, whoever writes waits for the disk, a moment at a time."""
        deadline = self._clock() + _ROOM_S
        wanted = min(units, self._pool.num_units // 2)
        while self._pool.free_units < wanted and self._loaded.wait(max(0.0, deadline - self._clock())):
            pass

    def _await(self, blocks: Sequence[Block], count: int, timeout_s: float, num_ready: int) -> int:
        """Wait for the first `count`; `num_ready` are known to be here. Returns how many are, maybe more."""
        deadline = self._clock() + timeout_s
        end = min(count, len(blocks))
        is_in_time = True
        while True:
            while num_ready < len(blocks) and blocks[num_ready].is_ready:
                num_ready += 1
            if num_ready >= end or blocks[num_ready].state is not BlockState.LOADING or not is_in_time:
                return num_ready
            # The last of them: woken for each, who waits would keep the disk's threads from their work.
            last = next(block for block in reversed(blocks[num_ready:end]) if block.state is BlockState.LOADING)
            is_in_time = self._wait_for(last, deadline)

    def _wait_for(self, block: Block, deadline: float) -> bool:
        """Until it was read, or could not be; False when that takes too long. Others have the lock meanwhile."""
        event = threading.Event()
        self._awaited.setdefault(block, []).append(event)
        self._lock.release()
        try:
            return event.wait(max(0.0, deadline - self._clock()))
        finally:
            self._lock.acquire()
            waiting = self._awaited.get(block)
            if waiting is not None and event in waiting:
                waiting.remove(event)
                if not waiting:
                    del self._awaited[block]

    def _not_only_stored(self, space: Space, hashes: Sequence[BlockHash]) -> tuple[Sequence[BlockHash], Sequence[int]]:
        """Without the hashes that are on disk and not in memory: those need not be written again."""
        if self._persistence is None:
            return hashes, range(len(hashes))
        stored = self._persistence.contains(space, hashes)
        positions = [
            position
            for position, block_hash in enumerate(hashes)
            if not stored[position] or block_hash in space.index.blocks
        ]
        return [hashes[position] for position in positions], positions

    def _commit(self, space: Space, blocks: Sequence[Block]) -> int:
        fresh = [block for block in blocks if isinstance(block, MemoryBlock) and not block.is_ready]
        num_committed = self._pool.commit(blocks)
        if self._persistence is not None and self._stores_on == "commit":
            self._persistence.queue(space, [block for block in fresh if block.is_ready])
        return num_committed

    def _store_reused(self, space: Space, blocks: Sequence[Block]) -> None:
        if self._persistence is None or self._stores_on != "reuse":
            return
        reused = []
        for block in blocks:
            assert isinstance(block, MemoryBlock)
            block.was_reused = True
            if block.is_ready and not block.is_stored and not block.is_queued:
                reused.append(block)
        if reused:
            self._persistence.queue(space, reused)
            self._persistence.order(space, [block.hash for block in blocks])

    def _free(self, blocks: Sequence[Block]) -> None:
        self._pool.free(blocks)
        self._leave_memory(blocks)

    def _leave_memory(self, blocks: Sequence[Block]) -> None:
        """Of a server that keeps nothing in memory: what is safe on disk and held by nobody goes."""
        if self._keeps_stored:
            return
        for block in blocks:
            if isinstance(block, MemoryBlock) and block.is_stored and block.is_ready and not block.num_refs:
                self._pool.drop(block.index, [block.hash])

    def _blocks_left(self, holder: Holder, space: Space) -> int:
        return max(0, self._held_units_per_client - holder.held_units) // space.index.block_units

    def _check_number(self, holder: Holder, number: int) -> None:
        if holder.is_gone:
            raise TierRefused("this client has said good-bye")
        if number in holder.leases or number in holder.reservations:
            raise TierRefused(f"number {number} is in use")

    def _hold(self, holder: Holder, holds: dict[int, _Hold], number: int, hold: _Hold) -> None:
        holds[number] = hold
        holder.held_units += len(hold.blocks) * hold.space.index.block_units
        if number in holder.ended_numbers:  # its end overtook it, on another connection
            del holder.ended_numbers[number]
            self._drop_hold(holder, holds, number)

    def _drop_hold(self, holder: Holder, holds: dict[int, _Hold], number: int) -> None:
        hold = holds.pop(number, None)
        if hold is None:
            holder.ended_numbers[number] = None
            if len(holder.ended_numbers) > _MAX_ENDED_NUMBERS:
                del holder.ended_numbers[next(iter(holder.ended_numbers))]
            return
        holder.held_units -= len(hold.blocks) * hold.space.index.block_units
        if self._persistence is not None and holds is holder.reservations:
            self._persistence.order(hold.space, [block.hash for block in hold.blocks])
        self._free(hold.blocks)
        self._forget_if_empty(hold.space)

    def _end(self, holder: Holder) -> None:
        for holds in (holder.leases, holder.reservations):
            for number in list(holds):
                self._drop_hold(holder, holds, number)
        holder.is_gone = True
        if self._holders.get(holder.id) is holder:
            del self._holders[holder.id]

    def _forget_if_empty(self, space: Space) -> None:
        if not space.num_users and not len(space.index):
            self._spaces.pop(space.number, None)
            if self._space_numbers.get(space.namespace) == space.number:
                del self._space_numbers[space.namespace]

    def _reason(self, is_at_limit: bool) -> str:
        if is_at_limit:
            limit = format_size(self._held_units_per_client * SLOT_ALIGN_BYTES)
            return f"this client may hold at most {limit} at once"
        total = format_size(self._pool.num_units * SLOT_ALIGN_BYTES)
        return f"all of the server's {total} is leased, pinned or being written"


def _num_ready(blocks: Sequence[Block]) -> int:
    ready = BlockState.READY
    for position, block in enumerate(blocks):
        if block.state is not ready:
            return position
    return len(blocks)


def _range_of(hold: _Hold, first: int, count: int) -> list[Block]:
    if first + count > len(hold.blocks):
        raise TierRefused(f"blocks {first}..{first + count} are outside the reservation of {len(hold.blocks)}")
    return hold.blocks[first : first + count]
