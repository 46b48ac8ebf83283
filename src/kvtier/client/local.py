"""Blocks of a server on this host: read and written in place, in memory that it shares. Thread-safe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.client.grants import NumberedGrant
from kvtier.client.server_blocks import ServerBlocks
from kvtier.errors import TierError, TierRefused
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Reservation
from kvtier.wire import messages as wire

_FIRST_PART_BYTES = 2 << 20
_PART_BYTES = 32 << 20


class LocalBlocks(ServerBlocks):
    """Leases and reservations have views of these blocks, without a copy."""

    def get(self, hashes: Sequence[BlockHash], into: Sequence[Buffer], timeout_s: float | None) -> int:
        with self.match(hashes, timeout_s) as lease:
            return lease.fetch(into)

    def stream(self, hashes: Sequence[BlockHash], into: list[memoryview] | None) -> Iterator[tuple[int, memoryview]]:
        with self.match(hashes, None) as lease:
            for position in range(lease.num_blocks):
                if lease.wait(position + 1) <= position:
                    return
                view = lease.views(position, 1)[0]
                if into is not None:
                    into[position][:] = view
                    view = into[position]
                yield position, view

    def reserve(self, hashes: Sequence[BlockHash], timeout_s: float | None) -> Reservation:
        return self._reserve_slots(NumberedGrant(self._endpoint, wire.Close), hashes, timeout_s)

    def store(
        self, hashes: Sequence[BlockHash], blocks: list[memoryview], deferred: bool, timeout_s: float | None
    ) -> list[int]:
        """Copy, then commit; in parts if the server has a disk, so that it writes the first while the next are copied.

        Returns the positions that were written.
        """
        grant = NumberedGrant(self._endpoint, wire.Close)
        reservation = self._reserve_slots(grant, hashes, timeout_s)
        wanted = [blocks[position] for position in reservation.positions]
        parts = self._parts_to_commit(len(wanted))
        do_later = self._endpoint.background.do_later

        def fill(part: slice) -> None:
            reservation.fill(wanted[part], part.start, part.stop - part.start)

        try:
            if deferred:
                for part in parts:
                    fill(part)
                    do_later(functools.partial(self._commit_quietly, reservation, part))
                do_later(reservation.close)
            elif parts:
                fill(parts[0])
                self._commit(grant, parts, fill, len(wanted) * self._block_bytes)
        except BaseException:
            reservation.close()
            raise
        if not deferred:
            reservation.close()
        return list(reservation.positions)

    def _reserve_slots(self, grant: NumberedGrant, hashes: Sequence[BlockHash], timeout_s: float | None) -> Reservation:
        deadline = self._endpoint.deadline(timeout_s)
        with grant, self._endpoint.connection(deadline) as connection:
            reserved = self._reserve(connection, grant, hashes, deadline)
            arena = self._endpoint.mapping.arena_of(connection)
            offsets = self._offsets_in(arena, reserved.offsets)
        return Reservation(
            arena,
            offsets,
            self._block_bytes,
            wire.unpack_numbers(reserved.positions),
            (reserved.num_ready, reserved.num_pending, reserved.num_refused),
            lambda first, count: self._commit(grant, [slice(first, first + count)]),
            grant.end,
            grant.forget,
        )

    def _commit(
        self, grant: NumberedGrant, parts: Sequence[slice], fill: Callable[[slice], None] | None = None, nbytes: int = 0
    ) -> int:
        """A part is reported to the server while `fill` copies the next; its answers are read at the end."""
        deadline = self._endpoint.deadline(None, nbytes)
        with self._endpoint.connection(deadline) as connection:
            if not grant.is_held_by(connection):
                raise TierRefused("the server that held this reservation is gone")
            sent = []
            for position, part in enumerate(parts):
                if position and fill is not None:
                    fill(part)
                commit = wire.Commit(grant.number, part.start, part.stop - part.start)
                sent.append(connection.send(commit, deadline=deadline))
            return sum(connection.receive(request, wire.Counted, deadline).count for request in sent)

    def _commit_quietly(self, reservation: Reservation, part: slice) -> None:
        try:
            reservation.commit(part.start, part.stop - part.start)
        except TierError as error:  # nothing to retry: the slots go back when the reservation is closed
            self._endpoint.counts.failed(error)

    def _parts_to_commit(self, count: int) -> list[slice]:
        """One part, unless there is a disk: then small parts first, so that it begins at once, then larger ones."""
        if count and not self._endpoint.has_disk:
            return [slice(0, count)]
        parts: list[slice] = []
        first, nbytes = 0, _FIRST_PART_BYTES
        while first < count:
            end = min(count, first + max(1, nbytes // self._block_bytes))
            parts.append(slice(first, end))
            first, nbytes = end, min(2 * nbytes, _PART_BYTES)
        return parts
