"""Blocks of a server over TCP: copied between its memory and the caller's, over several connections. Thread-safe.

Every block is verified as it arrives.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import xxhash

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.client.endpoint import Endpoint
from kvtier.client.grants import NumberedGrant
from kvtier.client.server_blocks import ServerBlocks
from kvtier.client.server_connection import joined
from kvtier.errors import BlockCorrupt, RemoteProtocolError, TierError, TierUnavailable
from kvtier.memory.checksum import start_checksum
from kvtier.memory.copying import Buffer, byte_views
from kvtier.wire import messages as wire
from kvtier.wire.frames import MAX_HASHES
from kvtier.workers import Workers

_FRAME_BYTES = 32 << 20
_STREAM_FRAME_BYTES = 8 << 20
"""Bytes per frame of a stream: the first blocks arrive early; a frame per block would cost a fifth of the rate."""


class RemoteBlocks(ServerBlocks):
    """The blocks of `namespace`. Each of `workers` uses a connection of its own."""

    def __init__(self, endpoint: Endpoint, block_bytes: int, namespace: Namespace, workers: Workers) -> None:
        super().__init__(endpoint, block_bytes)
        self._namespace = namespace
        self._workers = workers

    def get(self, hashes: Sequence[BlockHash], into: Sequence[Buffer], timeout_s: float | None) -> int:
        num_hit = self._pull(hashes, byte_views(into[: len(hashes)], self._block_bytes, writable=True), timeout_s)
        self._endpoint.counts.found(num_hit, len(hashes))
        return num_hit

    def stream(self, hashes: Sequence[BlockHash], into: list[memoryview] | None) -> Iterator[tuple[int, memoryview]]:
        per_frame = max(1, _STREAM_FRAME_BYTES // self._block_bytes)
        if into is None:
            scratch = [memoryview(bytearray(self._block_bytes)) for _ in range(min(per_frame, len(hashes)))]
            targets = list(itertools.islice(itertools.cycle(scratch), len(hashes)))
        else:
            targets = into

        def deadline() -> float:
            return self._endpoint.deadline(None, self._block_bytes)

        def place(blocks: wire.Blocks) -> list[memoryview]:
            if blocks.count > per_frame or blocks.first + blocks.count > len(hashes):
                raise RemoteProtocolError("the server sent other blocks than it was asked for")
            return targets[blocks.first : blocks.first + blocks.count]

        num_hit = 0
        verifier = _Verifier(self._namespace, hashes)
        try:
            with self._endpoint.connection(deadline()) as connection:
                request = wire.GetRequest(connection.space, joined(hashes), per_frame)
                for blocks in connection.get_blocks(request, place, verifier.taste, deadline):
                    for position in range(blocks.first, blocks.first + blocks.count):
                        num_hit += 1
                        yield position, targets[position]
        except TierError as error:
            self._note(error, verifier)
            for position in range(num_hit, verifier.num_whole):  # of an incomplete frame
                num_hit += 1
                yield position, targets[position]
        finally:
            self._endpoint.counts.found(num_hit, len(hashes))

    def store(
        self, hashes: Sequence[BlockHash], blocks: list[memoryview], deferred: bool, timeout_s: float | None
    ) -> list[int]:
        """Returns the positions that were written."""
        endpoint = self._endpoint
        deadline = endpoint.deadline(timeout_s, len(hashes) * self._block_bytes)
        with NumberedGrant(endpoint, wire.Close) as grant:
            with endpoint.connection(deadline) as connection:
                reserved = self._reserve(connection, grant, hashes, deadline)
            positions = wire.unpack_numbers(reserved.positions)
            if not positions:
                return []
            wanted = [blocks[position] for position in positions]
            parts = self._parts(len(wanted))
            if len(parts) == 1:
                self._fill(grant, wanted, parts[0], deadline)
            else:
                self._workers.map(lambda part: self._fill(grant, wanted, part, deadline), parts)
        if deferred:
            endpoint.background.do_later(grant.end)
        else:
            grant.end()
        return positions

    def _pull(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], timeout_s: float | None = None) -> int:
        """Get over several connections. Returns the leading blocks that arrived."""
        hashes = hashes[:MAX_HASHES]
        if not hashes:
            return 0
        parts = self._parts(len(hashes))
        if len(parts) == 1:
            return self._pull_part(hashes, into, timeout_s)
        try:
            counts = self._workers.map(lambda part: self._pull_part(hashes[part], into[part], timeout_s), parts)
        except TierUnavailable as error:
            self._endpoint.counts.failed(error)
            return 0
        total = 0
        for part, count in zip(parts, counts, strict=True):
            if total == part.start:
                total += count
        return total

    def _pull_part(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], timeout_s: float | None) -> int:
        deadline = self._endpoint.deadline(timeout_s, len(hashes) * self._block_bytes)
        per_frame = max(1, _FRAME_BYTES // self._block_bytes)

        def place(blocks: wire.Blocks) -> list[memoryview]:
            return list(into[blocks.first : blocks.first + blocks.count])

        arrived = 0
        verifier = _Verifier(self._namespace, hashes)
        try:
            with self._endpoint.connection(deadline) as connection:
                request = wire.GetRequest(connection.space, joined(hashes), per_frame)
                for blocks in connection.get_blocks(request, place, verifier.taste, lambda: deadline):
                    arrived += blocks.count
        except TierError as error:
            self._note(error, verifier)
        return min(arrived, len(into))

    def _note(self, error: TierError, verifier: _Verifier) -> None:
        self._endpoint.counts.failed(error)
        if isinstance(error, BlockCorrupt):
            self._endpoint.background.do_later(functools.partial(self._suspect, verifier.next_hash))

    def _suspect(self, block_hash: BlockHash) -> None:
        """Have the server check whether its own copy was altered; it is then dropped."""
        deadline = self._endpoint.deadline()
        try:
            with self._endpoint.connection(deadline) as connection:
                connection.call(wire.SuspectRequest(connection.space, joined([block_hash])), wire.Counted, deadline)
        except TierError as error:
            self._endpoint.counts.failed(error)

    def _fill(self, grant: NumberedGrant, blocks: Sequence[memoryview], part: slice, deadline: float) -> None:
        """Send `blocks[part]` into a reservation: all frames first, then their answers."""
        with self._endpoint.connection(deadline) as connection:
            frame_bytes = min(_FRAME_BYTES, connection.welcome.max_payload_bytes)
            step = max(1, frame_bytes // self._block_bytes)
            sent = []
            for first in range(part.start, part.stop, step):
                payload = blocks[first : min(first + step, part.stop)]
                fill = wire.Fill(grant.number, first, len(payload))
                sent.append(connection.send(fill, payload, deadline=deadline))
            for request in sent:
                connection.receive(request, wire.Counted, deadline)

    def _parts(self, count: int) -> list[slice]:
        """`count` blocks in even, adjacent parts, one for each worker."""
        num_parts = min(self._workers.count, count)
        bounds = [count * part // num_parts for part in range(num_parts + 1)]
        return [slice(start, end) for start, end in itertools.pairwise(bounds)]


class _Verifier:
    """Checks blocks as they arrive over the network, piece by piece."""

    def __init__(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> None:
        self._namespace = namespace
        self._hashes = hashes
        self._position = 0
        self._digest: xxhash.xxh3_64 | None = None

    @property
    def num_whole(self) -> int:
        """How many blocks arrived as they were stored."""
        return self._position

    @property
    def next_hash(self) -> BlockHash:
        """The hash of the block that was not checked completely."""
        return self._hashes[self._position]

    def taste(self, blocks: wire.Blocks, piece: memoryview, is_end: bool) -> None:
        """Raises `BlockCorrupt` unless the bytes are those stored under the hash."""
        block_hash = self._hashes[self._position]
        if self._digest is None:
            self._digest = start_checksum(self._namespace, block_hash)
        self._digest.update(piece)
        if not is_end:
            return
        offset = 8 * (self._position - blocks.first)
        if self._digest.intdigest() != int.from_bytes(blocks.checksums[offset : offset + 8], "little"):
            raise BlockCorrupt(f"block {block_hash.hex()[:12]} arrived with other bytes than were stored")
        self._digest = None
        self._position += 1
