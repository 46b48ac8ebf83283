"""Blocks of a server, common to this host and TCP: matching and reserving. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.client.endpoint import Endpoint
from kvtier.client.grants import NumberedGrant
from kvtier.client.server_connection import ServerConnection, joined
from kvtier.errors import RemoteProtocolError, TierError, TierFull, TierUnavailable
from kvtier.memory.lease import CLUSTER, DISK, BlockLease, EmptyLease, Lease
from kvtier.memory.mapped import MappedArena
from kvtier.wire import messages as wire
from kvtier.wire.frames import MAX_HASHES


class ServerBlocks:
    """The blocks of the namespace that `endpoint` opens."""

    def __init__(self, endpoint: Endpoint, block_bytes: int) -> None:
        self._endpoint = endpoint
        self._block_bytes = block_bytes

    def match(self, hashes: Sequence[BlockHash], timeout_s: float | None, *, is_lazy: bool = False) -> Lease:
        if not hashes:
            return EmptyLease(MatchEnd.ALL)
        try:
            return self._match(hashes[:MAX_HASHES], self._endpoint.deadline(timeout_s), is_lazy)
        except TierError as error:
            self._endpoint.counts.failed(error)
            ended = MatchEnd.TIER_DOWN
        except TierFull:
            ended = MatchEnd.LIMIT
        self._endpoint.counts.missed(len(hashes))
        return EmptyLease(ended)

    def _match(self, hashes: Sequence[BlockHash], deadline: float, is_lazy: bool) -> Lease:
        endpoint = self._endpoint
        with NumberedGrant(endpoint, wire.Release) as grant, endpoint.connection(deadline) as connection:
            request = wire.MatchRequest(connection.space, joined(hashes), grant.number, is_lazy)
            telling = endpoint.places.telling(connection, hashes)
            matched = connection.call(request, wire.Matched, deadline, after=telling)
            arena = endpoint.mapping.arena_of(connection) if endpoint.is_local else None
            offsets = self._offsets_in(arena, matched.offsets)
            num_found = len(offsets) + matched.num_stored
            if num_found > len(hashes):
                raise RemoteProtocolError("the server matched more blocks than it was asked for")
            grant.given_by(connection)
        endpoint.counts.found(num_found, len(hashes))
        if not offsets:
            return EmptyLease(matched.match_end, matched.num_stored, _stored_in(matched))
        return BlockLease(
            arena,
            offsets,
            self._block_bytes,
            hashes[: len(offsets)],
            matched.match_end,
            self._pull,
            lambda count: self._await(grant, count),
            matched.num_ready,
            grant.end,
            grant.forget,
            num_stored=matched.num_stored,
            stored_in=_stored_in(matched),
        )

    def _await(self, grant: NumberedGrant, count: int) -> int:
        """How many of the first `count` blocks of a lease have come from disk; waits for them."""
        deadline = self._endpoint.deadline(None, count * self._block_bytes)
        try:
            with self._endpoint.connection(deadline) as connection:
                if not grant.is_held_by(connection):
                    raise TierUnavailable("the server that loaded these blocks is gone")
                return connection.call(wire.Await(grant.number, count), wire.Counted, deadline).count
        except TierError as error:
            self._endpoint.counts.failed(error)
            return 0

    def _pull(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
        """Bring the bytes of leased blocks that are not in this host's memory."""
        raise AssertionError("these blocks lie in memory of this host")

    def _reserve(
        self, connection: ServerConnection, grant: NumberedGrant, hashes: Sequence[BlockHash], deadline: float
    ) -> wire.Reserved:
        """Slots for the absent blocks of `hashes`. Raises `TierFull` if some are absent and there is room for none."""
        request = wire.ReserveRequest(connection.space, joined(hashes[:MAX_HASHES]), grant.number)
        telling = self._endpoint.places.telling(connection, hashes, is_stored=True) if hashes else ()
        reserved = connection.call(request, wire.Reserved, deadline, after=telling)
        if max(wire.unpack_numbers(reserved.positions), default=-1) >= len(hashes):
            raise RemoteProtocolError("the server reserved blocks that it was not asked for")
        if reserved.num_refused and not reserved.positions:
            raise TierFull(f"no room for {reserved.num_refused} blocks in {self._endpoint.address}: {reserved.reason}")
        if reserved.num_refused:
            self._endpoint.counts.refused(reserved.num_refused)
        grant.given_by(connection)
        return reserved

    def _offsets_in(self, arena: MappedArena | None, packed: bytes) -> list[int]:
        """The server's offsets, none of them outside its arena: copies to and from them are not checked."""
        offsets = wire.unpack_numbers(packed)
        if arena is not None and offsets and max(offsets) + self._block_bytes > arena.nbytes:
            raise RemoteProtocolError("the server named blocks outside its arena")
        return offsets


def _stored_in(matched: wire.Matched) -> str:
    """Where most of the match's unleased blocks are."""
    num_shared = matched.num_shared if isinstance(matched, wire.SharedMatch) else 0
    return CLUSTER if 2 * num_shared > matched.num_stored else DISK
