"""A client of the server, over all of its connections, with its leases and reservations.

A local client has mapped the memory of its leased blocks, so its lease ends only when the client releases it or its
process ends. A remote client holds copies, so its lease may time out. Guarded by the catalog's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.blocks.block import Block
from kvtier.blocks.hashing import BlockHash
from kvtier.cacheserver.namespaces import Hashes, MemorySpace
from kvtier.cacheserver.tenants import Tenant
from kvtier.errors import TierRefused

_MAX_ENDED_NUMBERS = 4096
_MAX_LIMITED = 4096


@dataclass(slots=True)
class Claim:
    """One lease or reservation. `num_fills` frames with bytes for its blocks are arriving.

    A reservation that `has_ended` still counts as held until the last of those frames is over.
    """

    blocks: list[Block]
    space: MemorySpace
    touched_at: float
    num_ready: int = 0
    num_fills: int = 0
    has_ended: bool = False

    @property
    def num_units(self) -> int:
        return len(self.blocks) * self.space.index.block_units

    def is_late(self, touched_before: float) -> bool:
        """Whether the claim has been idle since. A frame being received keeps it alive, as its own pace is enforced."""
        return self.touched_at < touched_before and not self.num_fills

    def part(self, first: int, count: int) -> list[Block]:
        if first + count > len(self.blocks):
            raise TierRefused(f"blocks {first}..{first + count} are outside the reservation of {len(self.blocks)}")
        return self.blocks[first : first + count]


@dataclass(slots=True, eq=False)
class ServedClient:
    """A client makes claims under numbers that it chooses.

    The end of a claim may overtake the claim itself, on another connection: `ended_numbers` has the latest of those.
    """

    id: bytes
    tenant: Tenant
    pid: int | None
    max_held_units: int
    num_connections: int = 0
    leases: dict[int, Claim] = field(default_factory=dict)
    reservations: dict[int, Claim] = field(default_factory=dict)
    held_units: int = 0
    ended_numbers: dict[int, None] = field(default_factory=dict)
    limited: dict[BlockHash, None] = field(default_factory=dict)
    """The last blocks of prompts whose latest lease met the limit: the client may ask for them again and again."""
    is_gone: bool = False
    refusals_reported: Counter[tuple[str, str]] | None = None

    @property
    def is_local(self) -> bool:
        return self.pid is not None

    def blocks_left(self, number: int, space: MemorySpace, hashes: Hashes = ()) -> int:
        """How many more blocks the client may hold, under the new `number`. Raises `TierRefused` if it is in use.

        More if they are the first of `hashes`, and its tenant holds some of these already.
        """
        if self.is_gone:
            raise TierRefused("this client has already said goodbye")
        if number in self.leases or number in self.reservations:
            raise TierRefused(f"number {number} is in use")
        return self.room_left(space, hashes)

    def room_left(self, space: MemorySpace, hashes: Hashes = ()) -> int:
        """How many more blocks of `space` the client may hold, if they are the first of `hashes`."""
        units, holds = space.index.block_units, self.tenant.holds
        left = max(0, self.max_held_units - self.held_units) // units
        return min(left, holds.left // units + holds.num_held(space.index.blocks, hashes))

    def most_blocks(self, space: MemorySpace) -> int:
        """How many blocks of `space` the client could hold if nothing else were held."""
        return min(self.max_held_units, self.tenant.holds.most) // space.index.block_units

    def note_ended(self, last: BlockHash, *, is_limited: bool) -> bool:
        """Note whether a lease of the prompt that ends with `last` met the limit. Returns whether its last one did."""
        was_limited = last in self.limited
        self.limited.pop(last, None)
        if is_limited:
            self.limited[last] = None
            if len(self.limited) > _MAX_LIMITED:
                del self.limited[next(iter(self.limited))]
        return was_limited

    def add(self, claims: dict[int, Claim], number: int, claim: Claim) -> bool:
        """Make a claim; False if its end came first, so that the caller must end it at once."""
        claims[number] = claim
        self._hold(claim.space, claim.blocks)
        if number in self.ended_numbers:
            del self.ended_numbers[number]
            return False
        return True

    def extend(self, claim: Claim, blocks: list[Block]) -> None:
        """Add blocks to a claim."""
        claim.blocks += blocks
        self._hold(claim.space, blocks)

    def take(self, claims: dict[int, Claim], number: int) -> Claim | None:
        """End a claim; the caller frees its blocks."""
        claim = claims.pop(number, None)
        if claim is not None:
            claim.has_ended = True
            if not claim.num_fills:
                self._free(claim)
        else:
            self.ended_numbers[number] = None
            if len(self.ended_numbers) > _MAX_ENDED_NUMBERS:
                del self.ended_numbers[next(iter(self.ended_numbers))]
        return claim

    def begin_filling(self, claim: Claim, blocks: list[Block]) -> Filling:
        """Note that bytes for `blocks` of a claim arrive. The caller references the blocks until `end_filling`."""
        claim.num_fills += 1
        return Filling(self, claim, blocks)

    def end_filling(self, filling: Filling) -> None:
        """Note that the bytes have arrived or failed to. The caller frees the blocks."""
        claim = filling.claim
        claim.num_fills -= 1
        if claim.has_ended and not claim.num_fills:
            self._free(claim)

    def _hold(self, space: MemorySpace, blocks: Sequence[Block]) -> None:
        self.held_units += len(blocks) * space.index.block_units
        self.tenant.holds.add(blocks)

    def _free(self, claim: Claim) -> None:
        self.held_units -= claim.num_units
        self.tenant.holds.remove(claim.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """Blocks of a client's reservation while their bytes arrive."""

    client: ServedClient
    claim: Claim
    blocks: list[Block]

    @property
    def space(self) -> MemorySpace:
        return self.claim.space
