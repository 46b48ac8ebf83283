"""An object store as a tier: whole segments of long prompts, for days. Thread-safe.

Its leases are weak: a block may be gone when it is fetched. Offered blocks are written in the background, once their
whole segment was offered.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError
from kvtier.memory.copying import Buffer, byte_views
from kvtier.memory.lease import EmptyLease, Lease, weak_lease
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.objects.blocks import ObjectBlocks
from kvtier.stores.objects.config import ObjectsConfig, open_blocks
from kvtier.stores.objects.segment_book import SegmentPlace
from kvtier.tiers.seen_blocks import SeenBlocks
from kvtier.tiers.tier import PlainTier

_BYTES_PER_S = 20e6
"""The bandwidth that deadlines assume: the slowest store worth using."""
_DROP_ALL_S = 600.0


def open_object_tier(
    config: ObjectsConfig, layout: KvLayout, namespace: Namespace, metrics: TierMetrics, name: str = "objects"
) -> ObjectTier:
    """Open the tier. The store need not be up yet: it is used once it answers. Raises `ConfigError`."""

    def count(kind: str, times: int) -> None:
        metrics.failures.labels(tier=name, kind=kind).inc(times)

    blocks = open_blocks(config, namespace, layout.block_bytes, count)
    return ObjectTier(blocks, layout, timeout_s=config.timeout_s, name=name)


class ObjectTier(PlainTier):
    """Owns `blocks`. A call waits at most `timeout_s`, plus the time that its bytes should take."""

    def __init__(self, blocks: ObjectBlocks, layout: KvLayout, *, timeout_s: float, name: str = "objects") -> None:
        self.name = name
        self.layout = layout
        self._blocks = blocks
        self._timeout_s = timeout_s
        self._seen = SeenBlocks()

    @property
    def holds_leases(self) -> bool:
        return False

    @property
    def segmented(self) -> ObjectTier:
        return self

    @property
    def segment_blocks(self) -> int:
        return self._blocks.segment_blocks

    def has_segments(self, names: Sequence[BlockHash]) -> list[bool | None]:
        return self._blocks.has_segments(names)

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        self._blocks.learn(hashes)

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        if not hashes:
            return EmptyLease(MatchEnd.ALL)
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        places = self._blocks.places(hashes, deadline)
        num_blocks = places.index(None) if None in places else len(places)
        self._seen.note(hashes[:num_blocks])
        ended = self._seen.ending(hashes[num_blocks]) if num_blocks < len(hashes) else MatchEnd.ALL
        if not num_blocks:
            return EmptyLease(ended)
        known = dict(zip(hashes, places[:num_blocks], strict=False))
        return weak_lease(hashes[:num_blocks], self.layout.block_bytes, ended, functools.partial(self._pull, known))

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        """Returns how many blocks were taken in. They are stored once their whole segment was taken in and written."""
        if len(hashes) != len(blocks):
            raise ConfigError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        return self._blocks.put(hashes, byte_views(blocks, self.layout.block_bytes, writable=False))

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Blocks behind the first absent segment count as absent: nothing is known of them."""
        return self._blocks.find(hashes, time.monotonic() + self._timeout_s)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        self._seen.forget(hashes)
        if hashes is None:
            return self._blocks.drop_all(time.monotonic() + _DROP_ALL_S)
        return self._blocks.drop(hashes, time.monotonic() + self._timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all offered whole segments are written, or lost; False past the timeout."""
        return self._blocks.flush(timeout_s)

    def close(self) -> None:
        self._blocks.close()

    def _pull(
        self, places: Mapping[BlockHash, SegmentPlace | None], hashes: Sequence[BlockHash], into: Sequence[memoryview]
    ) -> int:
        """Fetch from the places that the match found: prompts seen since may have the same blocks in other segments."""
        deadline = time.monotonic() + self._timeout_s + len(hashes) * self.layout.block_bytes / _BYTES_PER_S
        arrived = self._blocks.get(hashes, into, deadline, [places[block_hash] for block_hash in hashes])
        return arrived.index(False) if False in arrived else len(arrived)
