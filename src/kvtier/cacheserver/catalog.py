"""What the server holds and who holds on to it: namespaces, leases, reservations, over one block pool.

Thread-safe: one short lock around everything, never held over I/O. A *holder* is a client, whatever number of
connections it has. What a local holder leases lies in memory it has mapped, so only the holder itself, or the end of
its process, gives it back; what a remote holder leases it only names, so a clock may end it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES, slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import Block, BlockPool, Grant, PrefixIndex, Presence
from kvtier.errors import TierRefused
from kvtier.sizes import format_size

_MAX_ENDED_NUMBERS = 4096


class Space:
    """One namespace's blocks. `num_users` connections have it open."""

    def __init__(self, number: int, namespace: Namespace, name: str, block_bytes: int) -> None:
        self.number = number
        self.namespace = namespace
        self.name = name
        self.block_bytes = block_bytes
        self.index = PrefixIndex(slot_bytes_of(block_bytes) // SLOT_ALIGN_BYTES)
        self.num_users = 0


@dataclass(slots=True)
class _Hold:
    """One lease or reservation."""

    blocks: list[Block]
    space: Space
    touched_at: float


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
    blocks: list[Block]
    ended: str


class Catalog:
    """All operations on what is cached. Offsets are `block.start * SLOT_ALIGN_BYTES`."""

    def __init__(
        self,
        memory_bytes: int,
        *,
        leased_bytes_per_client: int,
        pinned_bytes: int,
        lease_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._pool = BlockPool(memory_bytes // SLOT_ALIGN_BYTES)
        self._held_units_per_client = leased_bytes_per_client // SLOT_ALIGN_BYTES
        self._max_pinned_units = pinned_bytes // SLOT_ALIGN_BYTES
        self._lease_timeout_s = lease_timeout_s
        self._clock = clock
        self._spaces: dict[int, Space] = {}
        self._space_numbers: dict[Namespace, int] = {}
        self._last_space_number = 0
        self._holders: dict[bytes, Holder] = {}

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
        """A connection ended. A remote holder without connections is gone; a local one only with its process."""
        with self._lock:
            holder.num_connections -= 1
            if not holder.num_connections and not holder.is_local:
                self._end(holder)

    def end(self, holder: Holder) -> None:
        """The client said good-bye, or its process is gone: everything it held comes back."""
        with self._lock:
            self._end(holder)

    def open(self, namespace: Namespace, name: str, block_bytes: int) -> Space:
        """Use a namespace; `close` it once per call. Raises `TierRefused` for another block size than it has."""
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
                self._spaces[number] = Space(number, namespace, name, block_bytes)
            space = self._spaces[number]
            if space.block_bytes != block_bytes:
                raise TierRefused(
                    f"namespace {namespace.hex()[:12]} ({space.name or 'unnamed'}) has blocks of {space.block_bytes} "
                    f"bytes here; this client says {block_bytes}"
                )
            space.num_users += 1
            return space

    def close(self, space: Space) -> None:
        with self._lock:
            space.num_users -= 1
            self._forget_if_empty(space)

    # --- reading ---------------------------------------------------------------------------------------------------

    def lease(self, holder: Holder, number: int, space: Space, hashes: Sequence[BlockHash]) -> LeaseOutcome:
        """Lease the longest cached prefix of `hashes` to `holder` under `number`."""
        with self._lock:
            self._check_number(holder, number)
            max_blocks = self._blocks_left(holder, space)
            match = self._pool.match(space.index, hashes, max_blocks)
            ended = _ENDED[match.ended]
            if ended == "all" and len(match.blocks) < len(hashes):
                ended = "limit"
            if match.blocks:
                self._hold(holder, holder.leases, number, _Hold(match.blocks, space, self._clock()))
            return LeaseOutcome(match.blocks, ended)

    def release(self, holder: Holder, number: int) -> None:
        with self._lock:
            self._drop_hold(holder, holder.leases, number)

    def borrow(self, space: Space, hashes: Sequence[BlockHash]) -> list[Block]:
        """Reference the longest cached prefix while it is sent; `give_back` ends that."""
        with self._lock:
            return self._pool.match(space.index, hashes).blocks

    def give_back(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            self._pool.free(blocks)

    def contains(self, space: Space, hashes: Sequence[BlockHash]) -> bytes:
        with self._lock:
            return bytes(space.index.presence(block_hash) is Presence.READY for block_hash in hashes)

    # --- writing ---------------------------------------------------------------------------------------------------

    def reserve(self, holder: Holder, number: int, space: Space, hashes: Sequence[BlockHash]) -> tuple[Grant, str]:
        """Room for the absent ones of `hashes`, and why some got none."""
        with self._lock:
            self._check_number(holder, number)
            max_blocks = self._blocks_left(holder, space)
            grant = self._pool.reserve(space.index, hashes, max_blocks)
            if grant.blocks:
                self._hold(holder, holder.reservations, number, _Hold(grant.blocks, space, self._clock()))
            return grant, self._reason(len(grant.blocks) == max_blocks) if grant.num_refused else ""

    def fill(self, holder: Holder, number: int, first: int, count: int) -> tuple[Space, list[Block]] | None:
        """Blocks of a reservation to receive bytes into, with a reference of their own; None when it has ended."""
        with self._lock:
            hold = holder.reservations.get(number)
            if hold is None:
                return None
            blocks = _range_of(hold, first, count)
            hold.touched_at = self._clock()
            self._pool.reference(blocks)
            return hold.space, blocks

    def commit_filled(self, blocks: Sequence[Block]) -> int:
        """The bytes of blocks from `fill` have arrived. Ends their extra reference."""
        with self._lock:
            num_committed = self._pool.commit(blocks)
            self._pool.free(blocks)
            return num_committed

    def commit(self, holder: Holder, number: int, first: int, count: int) -> int | None:
        """A local client has written these blocks of its reservation itself; None when it has ended."""
        with self._lock:
            hold = holder.reservations.get(number)
            if hold is None:
                return None
            return self._pool.commit(_range_of(hold, first, count))

    def close_reservation(self, holder: Holder, number: int) -> None:
        with self._lock:
            self._drop_hold(holder, holder.reservations, number)

    # --- keeping and forgetting ------------------------------------------------------------------------------------

    def pin(self, space: Space, hashes: Sequence[BlockHash]) -> int:
        """Raises `TierRefused` when the share for pinned blocks is used up; the leading ones are pinned then."""
        with self._lock:
            num_ready = sum(space.index.presence(block_hash) is Presence.READY for block_hash in hashes)
            num_pinned = self._pool.pin(space.index, hashes, self._max_pinned_units)
        if num_pinned < num_ready:
            limit = format_size(self._max_pinned_units * SLOT_ALIGN_BYTES)
            raise TierRefused(f"pinned {num_pinned} of {num_ready} blocks: at most {limit} may be pinned")
        return num_pinned

    def unpin(self, space: Space, hashes: Sequence[BlockHash]) -> int:
        with self._lock:
            return self._pool.unpin(space.index, hashes)

    def drop(self, space: Space, hashes: Sequence[BlockHash]) -> int:
        """Forget `hashes`, or all of the namespace when there are none."""
        with self._lock:
            return self._pool.drop(space.index, hashes or list(space.index.blocks))

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
            return num_ended

    def levels(self) -> dict[str, float]:
        """The numbers that go up and down, and the count of evictions."""
        with self._lock:
            pool = self._pool
            holders = self._holders.values()
            return {
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
        with self._lock:
            return [
                {
                    "namespace": space.namespace.hex(),
                    "name": space.name,
                    "block_bytes": space.block_bytes,
                    "blocks": len(space.index),
                    "used_bytes": len(space.index) * slot_bytes_of(space.block_bytes),
                    "connections": space.num_users,
                }
                for space in self._spaces.values()
            ]

    # --- private, under the lock -----------------------------------------------------------------------------------

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
        self._pool.free(hold.blocks)
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


_ENDED = {Presence.READY: "all", Presence.MISS: "miss", Presence.PENDING: "pending"}


def _range_of(hold: _Hold, first: int, count: int) -> list[Block]:
    if first + count > len(hold.blocks):
        raise TierRefused(f"blocks {first}..{first + count} are outside the reservation of {len(hold.blocks)}")
    return hold.blocks[first : first + count]
