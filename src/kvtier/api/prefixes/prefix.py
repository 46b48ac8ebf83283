"""A prefix as clients see it: from its record and the places of its blocks, or from all blocks of a namespace. Pure."""

from __future__ import annotations

import msgspec

from kvtier.api.prefixes.cache import DISK, MEMORY, Placed
from kvtier.api.prefixes.record import PrefixRecord
from kvtier.blocks.layout import slot_bytes_of
from kvtier.client.known_namespace import KnownNamespace


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix as clients see it; without a name, all cached blocks of a namespace.

    `key` is the name of the API key whose chats begin with the prefix.
    `pinned_blocks` is the cache's count, or None while the cache does not answer. `is_pinned`: the name has a pin, and
    the cache keeps all of its blocks for it, as far as that is known.
    """

    name: str | None
    model: str
    namespace: str
    key: str
    tokens: int
    blocks: int
    bytes: int
    bytes_by_tier: dict[str, int]
    last_used: float | None
    hits: int | None
    is_pinned: bool
    pinned_blocks: int | None
    expires_at: float | None


def prefix_of(record: PrefixRecord, placed: Placed | None) -> Prefix:
    return Prefix(
        name=record.name,
        model=record.model,
        namespace=record.namespace,
        key=record.key,
        tokens=record.tokens,
        blocks=record.blocks,
        bytes=0 if placed is None else placed.num_cached * placed.slot_bytes,
        bytes_by_tier={} if placed is None else placed.bytes_by_tier,
        last_used=record.last_used,
        hits=record.hits,
        is_pinned=record.is_pinned and (placed is None or placed.num_pinned == record.blocks),
        pinned_blocks=None if placed is None else placed.num_pinned,
        expires_at=record.expires_at,
    )


def prefix_of_namespace(model: str, known: KnownNamespace) -> Prefix:
    slot_bytes = slot_bytes_of(known.block_bytes) if known.block_bytes else 0
    tiers = {MEMORY: known.blocks * slot_bytes, DISK: known.disk_blocks * slot_bytes}
    num_blocks = max(known.blocks, known.disk_blocks)
    return Prefix(
        name=None,
        model=model,
        namespace=known.digest,
        key="",
        tokens=num_blocks * known.block_tokens,
        blocks=num_blocks,
        bytes=num_blocks * slot_bytes,
        bytes_by_tier={tier: nbytes for tier, nbytes in tiers.items() if nbytes},
        last_used=None,
        hits=None,
        is_pinned=False,
        pinned_blocks=None,
        expires_at=None,
    )
