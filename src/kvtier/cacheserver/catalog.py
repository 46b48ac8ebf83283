"""The server's state: namespaces, clients with their leases and reservations, and cached blocks.

Thread-safe: one short lock around everything, never held over I/O.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.blocks.block import Block, BlockState, Presence
from kvtier.blocks.eviction import Eviction
from kvtier.blocks.ghosts import scope_of
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import Grant
from kvtier.cacheserver.cached_blocks import CachedBlocks, Clock, num_ready
from kvtier.cacheserver.cluster_below import NO_CLUSTER, SharedCluster
from kvtier.cacheserver.cluster_spaces import NOWHERE, Elsewhere
from kvtier.cacheserver.inventory import Inventory, flags_of
from kvtier.cacheserver.namespaces import Hashes, MemorySpace, Namespaces
from kvtier.cacheserver.persistence import NO_DISK, Disk
from kvtier.cacheserver.pieces import PIECE_HASHES
from kvtier.cacheserver.retentions import Retentions
from kvtier.cacheserver.sealer import NO_SEALER, NoSealer, Sealer
from kvtier.cacheserver.served_client import Claim, Filling, ServedClient
from kvtier.cacheserver.tenants import Tenant, Tenants, split_tagged
from kvtier.errors import TierRefused
from kvtier.sizes import format_size
from kvtier.wire.messages import (
    LISTED_CACHED,
    LISTED_CLUSTER,
    LISTED_DISK,
    LISTED_DOWN,
    LISTED_EVICTED,
    LISTED_PENDING,
    LISTED_PINNED,
)

MAX_AT_ONCE = 1 << 14
"""Most blocks to look at under one hold of the lock, which takes a few milliseconds."""
_PAUSE_S = 0.0001


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """The blocks of a lease; the first `num_ready` are in memory, the others are loading.

    For a lazy lease, `num_stored` counts the blocks that follow on disk, in the cluster or in memory, which the lease
    does not hold. `num_shared` of them are in the cluster. `is_again`: it met the limit when the client last asked.
    """

    blocks: list[Block]
    ended: MatchEnd
    num_ready: int
    num_stored: int = 0
    num_shared: int = 0
    is_again: bool = False


def _why_refused(client: ServedClient, grant: Grant, max_blocks: int, num_units: int) -> str:
    """A sentence on why blocks were refused: the client reached its `max_blocks`, or all `num_units` are in use."""
    if not grant.num_refused:
        return ""
    if len(grant.blocks) == max_blocks:
        limit = format_size(client.max_held_units * SLOT_ALIGN_BYTES)
        tenant = f", and its tenant {client.tenant.name} has a limit of its own" if client.tenant.name else ""
        return f"this client may hold at most {limit} at once{tenant}"
    room = f"all of the server's {format_size(num_units * SLOT_ALIGN_BYTES)}"
    if grant.num_declined:
        return f"{room} is used by blocks that are likelier to be used again"
    return f"{room} is leased, pinned or being written"


def _own(disk: Disk, tenant: Tenant, client_namespace: Namespace) -> Namespace:
    """The server's own namespace for the one that `tenant` asks for, by its own name or by one listed in `spaces`."""
    if not tenant.sees_all:
        stored = disk.stored_space(client_namespace)
        if stored is not None and split_tagged(stored.name)[0] == tenant.name:
            return client_namespace
    return tenant.own(client_namespace)


class Catalog:
    """All operations on the cached blocks. Offsets are `block.start * SLOT_ALIGN_BYTES`."""

    def __init__(
        self,
        memory_bytes: int,
        *,
        leased_bytes_per_client: int,
        pinned_bytes: int,
        lease_timeout_s: float,
        tenants: Tenants | None = None,
        disk: Disk = NO_DISK,
        keeps_stored: bool = True,
        sealer: Sealer | NoSealer = NO_SEALER,
        cluster: SharedCluster = NO_CLUSTER,
        clock: Clock = time.monotonic,
        eviction: Eviction = "lru",
    ) -> None:
        """Without `keeps_stored`, a block leaves memory as soon as it is on disk and unreferenced."""
        self.tenants = Tenants(memory_bytes=memory_bytes, file_bytes=None, file=None) if tenants is None else tenants
        num_units = memory_bytes // SLOT_ALIGN_BYTES
        self._lock = threading.Lock()
        self._disk = disk
        self._cluster = cluster
        self._namespaces = Namespaces(num_units * SLOT_ALIGN_BYTES)
        is_shared = self.tenants.has_several
        self.blocks = CachedBlocks(
            num_units, disk, self._namespaces, self._lock, clock, keeps_stored, is_shared, sealer, cluster, eviction
        )
        self._pool = self.blocks.pool
        self.retentions = Retentions(self._lock, self._pool, disk, keeps_stored=keeps_stored)
        self._held_units_per_client = leased_bytes_per_client // SLOT_ALIGN_BYTES
        self._max_pinned_units = pinned_bytes // SLOT_ALIGN_BYTES
        self._lease_timeout_s = lease_timeout_s
        self._clock = clock
        self._clients: dict[tuple[Tenant, bytes], ServedClient] = {}
        """Keyed by the `Tenant` object, not its name: a changed role makes a new object of the same name."""
        self.inventory = Inventory(
            self._lock,
            self._pool,
            self._namespaces,
            self._clients.values(),
            self.tenants,
            self._disk,
            cluster,
            lambda: self.blocks.num_altered,
            self._max_pinned_units if keeps_stored else None,
        )

    # --- clients and namespaces ------------------------------------------------------------------------------------

    def join(self, client_id: bytes, pid: int | None, tenant: Tenant | None = None) -> ServedClient:
        """Register a connection of the client `client_id` of `tenant`, by default the server's owner.

        Raises `TierRefused` if another process uses that id.
        """
        tenant = self.tenants.owner if tenant is None else tenant
        with self._lock:
            client = self._clients.get((tenant, client_id))
            if client is None:
                client = ServedClient(client_id, tenant, pid, self._held_units_per_client)
                self._clients[tenant, client_id] = client
            elif client.pid != pid:
                raise TierRefused("this client's id belongs to another process; connect anew after a fork")
            client.num_connections += 1
            return client

    def leave(self, client: ServedClient) -> None:
        """Note that a connection ended. A client ends with its last one, unless it is local and holds blocks."""
        with self._lock:
            client.num_connections -= 1
            holds_nothing = not client.leases and not client.reservations
            if not client.num_connections and (holds_nothing or not client.is_local):
                self._end(client)

    def end(self, client: ServedClient) -> None:
        """End a client that said goodbye or whose process died: its leases and reservations end."""
        with self._lock:
            self._end(client)

    def open(
        self,
        client_namespace: Namespace,
        name: str,
        block_bytes: int,
        block_tokens: int,
        fields: str = "",
        tenant: Tenant | None = None,
        *,
        may_write: bool = True,
    ) -> MemorySpace:
        """Open a namespace; call `close` once for each `open`. Raises `TierRefused` if its block size differs.

        `fields` is JSON of the values that the namespace's digest covers, for people to read; empty if unknown. A
        client that may not write cannot change a namespace's name or fields for others.
        """
        tenant = self.tenants.owner if tenant is None else tenant
        with self._lock:
            namespace = _own(self._disk, tenant, client_namespace)
            stored = self._disk.stored_space(namespace)
            if tenant.sees_all:  # the namespace may be another tenant's
                tenant = self.tenants.owner if stored is None else self.tenants.owner_of(stored.name)
            may_make = may_write
            if not may_write and stored is not None and len(stored.index) and stored.block_bytes == block_bytes:
                may_make, fields = True, ""
                name, block_tokens = split_tagged(stored.name)[1], stored.block_tokens
            return self._namespaces.open(
                tenant, namespace, client_namespace, name, block_bytes, block_tokens, fields, may_make=may_make
            )

    def close(self, space: MemorySpace) -> None:
        with self._lock:
            space.num_users -= 1
            self._namespaces.forget_if_empty(space)

    # --- reading ---------------------------------------------------------------------------------------------------

    def lease(
        self, client: ServedClient, number: int, space: MemorySpace, hashes: Hashes, *, is_lazy: bool = False
    ) -> LeaseOutcome:
        """Lease the longest cached prefix of `hashes` to `client` under `number`; if lazy, only its part in memory."""
        elsewhere = self._look_elsewhere(space, hashes)
        before = self._lease_beginning(client, number, space, hashes) if len(hashes) > MAX_AT_ONCE else []
        with self._lock:
            try:
                max_blocks = max(len(before), client.blocks_left(number, space, hashes))
            except TierRefused:
                self.blocks.free(before)
                raise
            num_stored = 0
            if is_lazy:
                most_blocks = client.most_blocks(space)
                blocks, ended, num_stored = self.blocks.find_lazily(
                    space, hashes, max_blocks, most_blocks, elsewhere, before
                )
            else:
                rest = hashes[len(before) :] if before else hashes
                blocks, ended = self.blocks.find(space, rest, max_blocks - len(before), elsewhere)
                blocks = before + blocks if before else blocks
            if ended is MatchEnd.ALL and len(blocks) + num_stored < len(hashes):
                ended = MatchEnd.LIMIT
            num_here = num_ready(blocks) if self.blocks.num_loading else len(blocks)
            self._claim(client, client.leases, number, space, blocks)
            counted = hashes[len(blocks) : len(blocks) + num_stored] if elsewhere.found else ()
            num_shared = sum(map(elsewhere.found.__contains__, counted))
            is_limited = ended is MatchEnd.LIMIT
            is_again = bool(hashes) and client.note_ended(hashes[-1], is_limited=is_limited)
            return LeaseOutcome(blocks, ended, num_here, num_stored, num_shared, is_again)

    def _look_elsewhere(self, space: MemorySpace, hashes: Hashes) -> Elsewhere:
        """Look in the cluster for the hashes neither in memory nor on disk. Waits for it, without the lock."""
        if not self._cluster.is_there:
            return NOWHERE
        self._cluster.learn(space, hashes)
        wanted: list[BlockHash] = []
        for first in range(0, len(hashes), MAX_AT_ONCE):
            with self._lock:
                absent, goes_on = self.blocks.absent(space, hashes[first : first + MAX_AT_ONCE])
            wanted += absent
            if not goes_on or len(wanted) >= MAX_AT_ONCE:
                break
        return self._cluster.look(space, hashes, wanted)

    def _lease_beginning(self, client: ServedClient, number: int, space: MemorySpace, hashes: Hashes) -> list[Block]:
        """Reference the blocks in memory of a huge prompt, except its last piece. Serves others between pieces."""
        blocks: list[Block] = []
        for first in range(0, len(hashes) - MAX_AT_ONCE, MAX_AT_ONCE):
            with self._lock:
                end = first + MAX_AT_ONCE
                max_blocks = 0 if client.is_gone else client.blocks_left(number, space, hashes[:end]) - len(blocks)
                wanted = hashes[first:end]
                found = self.blocks.find_in_memory(space, wanted, max(0, max_blocks)).blocks
            blocks += found
            if len(found) < len(wanted):
                break
            time.sleep(_PAUSE_S)
        return blocks

    def await_lease(self, client: ServedClient, number: int, count: int, timeout_s: float) -> int | None:
        """Wait until the first `count` blocks of a lease are in memory.

        Returns the number of leading blocks in memory, which may exceed `count`, or None if the lease has ended.
        """
        with self._lock:
            claim = client.leases.get(number)
            if claim is None:
                return None
            claim.num_ready = self.blocks.wait(claim.blocks, count, timeout_s, claim.num_ready)
            return claim.num_ready

    def await_blocks(self, blocks: Sequence[Block], timeout_s: float) -> int:
        """Like `await_lease`, for blocks from `borrow`."""
        with self._lock:
            return self.blocks.wait(blocks, len(blocks), timeout_s, 0)

    def release(self, client: ServedClient, number: int) -> None:
        with self._lock:
            claim = client.leases.get(number)
            if claim is None or len(claim.blocks) <= MAX_AT_ONCE:
                self._end_claim(client, client.leases, number)
                return
            client.take(client.leases, number)
        blocks = claim.blocks
        while blocks:  # the end first, since it is to become the coldest; others are served between pieces
            with self._lock:
                self.blocks.free(blocks[-MAX_AT_ONCE:])
            del blocks[-MAX_AT_ONCE:]
            time.sleep(_PAUSE_S)
        with self._lock:
            self._namespaces.forget_if_empty(claim.space)

    def borrow(
        self, space: MemorySpace, hashes: Hashes, at_least: int = 1, tenant: Tenant | None = None
    ) -> tuple[list[Block], bool]:
        """Reference the longest cached prefix to send it. Returns the blocks, and whether they are all of the prefix.

        Some blocks may still be loading. The tenant's limit on held blocks applies, but never below `at_least` blocks.
        `return_borrowed` returns the references.
        """
        holds = (self.tenants.owner if tenant is None else tenant).holds
        elsewhere = self._look_elsewhere(space, hashes)
        with self._lock:
            units = space.index.block_units
            most = self._pool.num_units // units
            left = holds.left // units + holds.num_held(space.index.blocks, hashes)
            max_blocks = min(most, max(at_least, left))
            blocks = self.blocks.find(space, hashes, max_blocks, elsewhere)[0]
            holds.add(blocks)
            return blocks, len(blocks) < max_blocks or len(blocks) in (len(hashes), most)

    def return_borrowed(self, blocks: Sequence[Block], tenant: Tenant | None = None) -> None:
        holds = (self.tenants.owner if tenant is None else tenant).holds
        with self._lock:
            holds.remove(blocks)
            self.blocks.free(blocks)

    def contains(self, space: MemorySpace, hashes: Hashes) -> bytes:
        with self._lock:
            presence, ready = space.index.presence, Presence.READY
            stored = self._disk.contains(space, hashes)
            return bytes([there or presence(each) is ready for each, there in zip(hashes, stored, strict=True)])

    def presence(self, client_namespace: Namespace, hashes: Hashes, tenant: Tenant | None = None) -> bytes:
        """LISTED_ flags for each of `hashes`: where it is, or why it is absent. Uses no block and opens no space."""
        with self._lock:
            namespace = _own(self._disk, self.tenants.owner if tenant is None else tenant, client_namespace)
            scope = scope_of(namespace)
            space = self._namespaces.get(namespace)
            blocks = {} if space is None else space.index.blocks
            flags = self._disk.presence(namespace, hashes)
            for position, block_hash in enumerate(hashes):
                block = blocks.get(block_hash)
                if block is None:
                    if self.blocks.ghosts.has(block_hash, scope) and not flags[position] & LISTED_DISK:
                        flags[position] = LISTED_EVICTED
                elif block.is_ready:
                    flags[position] = flags[position] & (LISTED_DISK | LISTED_PINNED) | flags_of(block)
                elif block.state is BlockState.PENDING:
                    flags[position] = LISTED_PENDING
            return bytes(flags)

    def presence_elsewhere(
        self, client_namespace: Namespace, hashes: Hashes, flags: bytes, tenant: Tenant | None = None
    ) -> bytes:
        """Add to a prompt's `flags` the blocks that only the cluster has. Waits for the cluster, without the lock."""
        if all(flag & (LISTED_CACHED | LISTED_PENDING) for flag in flags):
            return flags
        with self._lock:
            namespace = _own(self._disk, self.tenants.owner if tenant is None else tenant, client_namespace)
        found = self._cluster.presence(namespace, hashes)
        return bytes(
            flag
            if flag & (LISTED_CACHED | LISTED_PENDING) or is_there is False
            else flag | LISTED_CLUSTER
            if is_there
            else flag or LISTED_DOWN
            for flag, is_there in zip(flags, found, strict=True)
        )

    # --- writing ---------------------------------------------------------------------------------------------------

    def reserve(
        self,
        client: ServedClient,
        number: int,
        space: MemorySpace,
        hashes: Hashes,
        *,
        num_before: int = 0,
        is_short: bool = False,
        may_decline: bool = False,
    ) -> tuple[Grant, str]:
        """Reserve slots for the absent blocks of `hashes`. Returns the grant, and why blocks were refused, if any.

        A reservation may be made in steps: this one adds to the `num_before` blocks already granted under `number`.
        If the previous step `is_short`, or the reservation has ended meanwhile, no block is granted. With
        `may_decline`, blocks worth less than those they would replace are refused, too.
        """
        self._cluster.follow(space, hashes)
        with self._lock:
            claim = client.reservations.get(number) if num_before else None
            max_blocks = client.blocks_left(number, space) if claim is None else client.room_left(space)
            if is_short or (num_before and claim is None):
                max_blocks = 0
            grant = self.blocks.reserve(space, hashes, max_blocks, may_decline=may_decline)
            if claim is None:
                self._claim(client, client.reservations, number, space, grant.blocks)
            else:
                client.extend(claim, grant.blocks)
        self._cluster.announce(space, grant.blocks)
        return grant, _why_refused(client, grant, max_blocks, self._pool.num_units)

    def fill(self, client: ServedClient, number: int, first: int, count: int) -> Filling | None:
        """Reference blocks of a reservation, to receive bytes into them.

        They count as held until `end_filling`, even if the reservation ends earlier. None if the reservation has
        ended already, or if some of these blocks are committed.
        """
        with self._lock:
            claim = client.reservations.get(number)
            if claim is None:
                return None
            blocks = claim.part(first, count)
            if any(block.is_ready for block in blocks):  # others may be reading them
                return None
            claim.touched_at = self._clock()
            self._pool.reference(blocks)
            return client.begin_filling(claim, blocks)

    def end_filling(self, filling: Filling, *, has_arrived: bool = True) -> int:
        """Commit the blocks of a `fill` whose bytes have arrived, or give them up. Returns how many became READY."""
        with self._lock:
            num_committed = self.blocks.commit(filling.space, filling.blocks) if has_arrived else 0
            filling.claim.touched_at = self._clock()
            self.blocks.free(filling.blocks)
            filling.client.end_filling(filling)
            return num_committed

    def commit(self, client: ServedClient, number: int, first: int, count: int) -> int | None:
        """Commit blocks that a local client has written in place; None if the reservation has ended."""
        with self._lock:
            claim = client.reservations.get(number)
            return None if claim is None else self.blocks.commit(claim.space, claim.part(first, count))

    def close_reservation(self, client: ServedClient, number: int) -> None:
        with self._lock:
            self._end_claim(client, client.reservations, number)

    # --- keeping and forgetting ------------------------------------------------------------------------------------

    def pin(self, space: MemorySpace, hashes: Hashes) -> int:
        """Raises `TierRefused` if the share for pinned blocks is used up; the leading blocks are pinned even so."""
        with self._lock:
            num_ready = sum(space.index.presence(block_hash) is Presence.READY for block_hash in hashes)
            share = space.tenant.memory.max_pinned
            max_units = self._max_pinned_units if share is None else share
            num_pinned = self._pool.pin(space.index, hashes, max_units)
            num_stored = self._disk.pin(space, hashes, keep=True)
        if num_pinned < num_ready:
            limit = format_size(max_units * SLOT_ALIGN_BYTES)
            raise TierRefused(f"pinned {num_pinned} of {num_ready} blocks: at most {limit} may be pinned")
        return max(num_pinned, num_stored)

    def unpin(self, space: MemorySpace, hashes: Hashes) -> int:
        with self._lock:
            return max(self._pool.unpin(space.index, hashes), self._disk.pin(space, hashes, keep=False))

    def touch(self, space: MemorySpace, hashes: Hashes) -> None:
        """Make the cached ones of `hashes` the most recently used blocks; the first hash becomes the hottest."""
        with self._lock:
            self._pool.touch(list(filter(None, map(space.index.blocks.get, hashes))))

    def drop(self, space: MemorySpace, hashes: Hashes) -> int:
        """Forget `hashes`, or the whole namespace if empty, in memory, on disk and in the cluster.

        A whole namespace is dropped in pieces: other requests are served in between.
        """
        with self._lock:
            wanted = list(hashes) or list(space.index.blocks)
        step = len(hashes) or PIECE_HASHES
        pieces = [wanted[first : first + step] for first in range(0, len(wanted), step)]
        num_dropped = 0
        for piece in pieces:
            with self._lock:
                num_dropped += self.blocks.drop(space, piece)
            if piece is not pieces[-1]:
                time.sleep(_PAUSE_S)
        num_dropped = max(num_dropped, self._disk.drop(space, hashes), self._cluster.drop(space, hashes))
        for piece in pieces:
            with self._lock:
                self.blocks.store_again(space, piece)
        return num_dropped

    # --- time ------------------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """End the leases and reservations of remote clients that have been idle too long. Returns how many ended.

        Also forgets unused namespaces without blocks.
        """
        with self._lock:
            late = self._clock() - self._lease_timeout_s
            num_ended = 0
            for client in self._clients.values():
                if client.is_local:
                    continue
                for claims in (client.leases, client.reservations):
                    for number in [number for number, claim in claims.items() if claim.is_late(late)]:
                        self._end_claim(client, claims, number)
                        num_ended += 1
            self._namespaces.forget_unused(self._disk.stored_space)
            return num_ended

    # --- private, under the lock -----------------------------------------------------------------------------------

    def _claim(
        self, client: ServedClient, claims: dict[int, Claim], number: int, space: MemorySpace, blocks: list[Block]
    ) -> None:
        if blocks and not client.add(claims, number, Claim(blocks, space, self._clock())):
            self._end_claim(client, claims, number)

    def _end_claim(self, client: ServedClient, claims: dict[int, Claim], number: int) -> None:
        claim = client.take(claims, number)
        if claim is None:
            return
        if claims is client.reservations:
            self._disk.order(claim.space, claim.blocks)
        self.blocks.free(claim.blocks)
        self._namespaces.forget_if_empty(claim.space)

    def _end(self, client: ServedClient) -> None:
        for claims in (client.leases, client.reservations):
            for number in list(claims):
                self._end_claim(client, claims, number)
        client.is_gone = True
        key = client.tenant, client.id
        if self._clients.get(key) is client:
            del self._clients[key]
