"""Bytes that engines move between tiers, from what each of them counts since its own start. One event loop."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.api.page.moved_blocks import Move


class MovedBytes:
    """Bytes moved by all engines since the first reading of each: a sum that never falls.

    An engine that does not answer for a while moves nothing meanwhile, and one that has restarted counts anew.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[tuple[str, str], float]] = {}
        self._bytes: dict[Move, float] = {}

    def take(self, engine: str, counts: Mapping[tuple[str, str], float]) -> None:
        """Note what `engine` has counted, by direction ("in" or "out" of a tier below it) and tier.

        All bytes that an engine loads go into its device. Out of it go the bytes of the tier that stores most, since
        slower tiers get copies of the same blocks.
        """
        before = self._counts.get(engine, counts)
        self._counts[engine] = dict(counts)
        moved = {"in": [0.0], "out": [0.0]}
        for (direction, tier), count in counts.items():
            earlier = before.get((direction, tier), 0.0)
            fresh = count - earlier if count >= earlier else count
            moved[direction].append(fresh)
            self._add(Move(direction, tier), fresh)
        self._add(Move("in", "device", engine), sum(moved["out"]))
        self._add(Move("out", "device", engine), max(moved["in"]))

    def all(self) -> dict[Move, float]:
        return dict(self._bytes)

    def _add(self, move: Move, nbytes: float) -> None:
        self._bytes[move] = self._bytes.get(move, 0.0) + nbytes
