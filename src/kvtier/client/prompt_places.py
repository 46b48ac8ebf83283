"""Where blocks stand in their prompts, for a server that keeps them in a cluster by that. Thread-safe.

Requests may be for parts of prompts. A server knows the place of a part whose beginning it has seen; otherwise the
client sends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.client.server_connection import ServerConnection
from kvtier.stores.valkey.segments import Segments
from kvtier.wire import messages as wire


class PromptPlaces:
    """The places of blocks used recently. Costs nothing if the server does not want places."""

    def __init__(self) -> None:
        self._segments: Segments | None = None
        self._segment_blocks = 0

    def meet(self, connection: ServerConnection) -> None:
        """The server has said how many blocks it keeps together, or nothing of that."""
        if connection.segment_blocks != self._segment_blocks:
            self._segment_blocks = connection.segment_blocks
            self._segments = Segments(self._segment_blocks) if self._segment_blocks else None

    @property
    def has_cluster(self) -> bool:
        """The server is above a cluster."""
        return self._segments is not None

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All of a prompt's hashes so far, from its first block on."""
        if self._segments is not None:
            self._segments.learn(hashes)

    def telling(
        self, connection: ServerConnection, hashes: Sequence[BlockHash], *, is_stored: bool = False
    ) -> list[wire.PlaceRequest]:
        """The messages to send before a request for `hashes`, a part of a prompt, or before it is stored (`is_stored`).

        Not when it is asked for a beginning: so the server takes what it has not heard of. Of a part that is asked for,
        the block before it is told, too: the beginning of its prompt is used here, and is to live on in the cluster.
        """
        segments = self._segments
        if segments is None or connection.segment_blocks != self._segment_blocks:
            return []
        place = segments.get(hashes[0])
        if place is None or not (0 if is_stored else 1) <= place.position <= wire.MAX_POSITION:
            return []
        told = [(hashes[0], place)]
        if not is_stored and place.before is not None and (before := segments.get(place.before)) is not None:
            told.insert(0, (place.before, before))
        return [wire.PlaceRequest(connection.space, block, at.head, at.position) for block, at in told]
