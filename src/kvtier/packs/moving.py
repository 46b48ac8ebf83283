"""Moves blocks between a cache server and a pack: reads a section while the previous one is written."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import slot_bytes_of
from kvtier.blocks.namespace import namespace_differences
from kvtier.client.client import CacheClient
from kvtier.client.known_namespace import KnownNamespace
from kvtier.client.room import room_of
from kvtier.errors import ConfigError, TierFull
from kvtier.observe.printable import printable
from kvtier.packs.form import PackHeader, PackReader, PackWriter, Section
from kvtier.sizes import format_size

_NUM_BUFFERS = 2
_MAX_SHOWN_FIELDS = 5
_ROOM_S = 30.0
_MAX_ROUNDS = 16
"""Most attempts to store a section: a cache whose blocks evict one another would otherwise never be done."""
_LOOK_S = 0.05

Advance = Callable[[int], None]
"""Called with the number of blocks just moved."""


def export_blocks(
    client: CacheClient, writer: PackWriter, header: PackHeader, hashes: Sequence[BlockHash], advance: Advance
) -> None:
    """Write all blocks to a pack. Raises `ConfigError` if the cache has lost some, and `OSError` if the file fails."""
    size = min(header.section_blocks, header.num_blocks) * header.block_bytes
    buffers = [memoryview(bytearray(size)) for _ in range(_NUM_BUFFERS)]
    starts = range(0, header.num_blocks, header.section_blocks)
    with ThreadPoolExecutor(1, "kvtier-pack") as threads:
        coming: Future[memoryview] | None = None
        for number, first in enumerate([*starts, None]):
            before = coming
            if first is not None:
                part = hashes[first : first + header.section_blocks]
                coming = threads.submit(_get, client, part, buffers[number % _NUM_BUFFERS], header.block_bytes, first)
            if before is not None:
                data = before.result()
                writer.write(data)
                advance(len(data) // header.block_bytes)
    writer.finish()


def _get(
    client: CacheClient, hashes: Sequence[BlockHash], into: memoryview, block_bytes: int, first: int
) -> memoryview:
    """Fetch blocks. A server may return fewer per call than requested: a client may lease only a part of its memory."""
    views = [into[number * block_bytes : (number + 1) * block_bytes] for number in range(len(hashes))]
    done = 0
    while done < len(hashes):
        got = client.get(hashes[done:], views[done:])
        if not got:
            raise ConfigError(f"block {first + done} is no longer in the cache, or unreadable: warm the prefix again")
        done += got
    return into[: len(hashes) * block_bytes]


def import_blocks(
    client: CacheClient, reader: PackReader, advance: Advance, finish: Callable[[], object] | None = None
) -> int:
    """Store all blocks that the cache lacks, and flush them. Returns how many.

    `finish` is called once all blocks are stored. Raises `ConfigError` for a damaged pack, `TierFull` if there is no
    room, and whatever `finish` raises; then the stored blocks are dropped.
    """
    header = reader.header
    size = min(header.section_blocks, header.num_blocks) * header.block_bytes
    stored: list[BlockHash] = []
    storing: Future[list[BlockHash]] | None = None
    try:
        with ThreadPoolExecutor(1, "kvtier-pack") as threads:
            try:
                for section in reader.sections([bytearray(size) for _ in range(_NUM_BUFFERS)]):
                    if storing is not None:
                        stored += storing.result()
                    hashes = reader.hashes[section.first : section.first + section.count]
                    storing = threads.submit(_store, client, hashes, section)
                    advance(section.count)
            finally:
                if storing is not None:
                    stored += storing.result()
        client.flush()
        num_kept = sum(client.contains(reader.hashes))
        if num_kept < header.num_blocks:  # the last blocks evicted the first ones
            raise TierFull(f"the cache kept {num_kept} of {header.num_blocks} blocks: it has too little room")
        if finish is not None:
            finish()
    except BaseException:
        client.drop(stored)
        raise
    return len(stored)


def check_room(client: CacheClient, reader: PackReader) -> None:
    """Raises `ConfigError` if the blocks that the cache lacks would evict others."""
    slot_bytes = slot_bytes_of(reader.header.block_bytes)
    needed = client.contains(reader.hashes).count(False) * slot_bytes
    room = room_of(client.stats())
    free = max(0, room.free_bytes)
    if needed > free:
        raise ConfigError(
            f"the pack needs {format_size(needed)}, but only {format_size(free)} of the {room.level} is free: "
            f"{format_size(needed - free)} of other blocks would be evicted; use --force if the pack is worth it"
        )


def _store(client: CacheClient, hashes: Sequence[BlockHash], section: Section) -> list[BlockHash]:
    """Store a section, waiting for room while the server writes to its disk. Returns the blocks that were absent.

    Stored blocks that are gone at the next check may have been evicted by later ones. Raises `TierFull`.
    """
    blocks = section.blocks()
    deadline = time.monotonic() + _ROOM_S
    stored: set[BlockHash] = set()
    rounds = 0
    while True:
        try:
            positions = client.store(hashes, blocks)
        except TierFull:
            positions = []
        rounds += any(hashes[position] in stored for position in positions)
        stored.update(hashes[position] for position in positions)
        if all(client.contains(hashes)):
            return list(stored)
        if positions and rounds < _MAX_ROUNDS:
            deadline = time.monotonic() + _ROOM_S
        elif rounds >= _MAX_ROUNDS or time.monotonic() > deadline:
            client.drop(list(stored))
            raise TierFull(f"the cache has no room for blocks from {section.first} on")
        time.sleep(_LOOK_S)


def check_namespace(header: PackHeader, known: Sequence[KnownNamespace]) -> KnownNamespace:
    """The cache's namespace that the pack is for. Raises `ConfigError`, naming the fields that differ."""
    _check_fields(header)
    for one in known:
        if one.digest == header.namespace:
            for field in ("block_bytes", "block_tokens"):
                if getattr(one, field) != getattr(header, field):
                    raise ConfigError(
                        f"the pack's {field} is {getattr(header, field)}, but the cache's is {getattr(one, field)}"
                    )
            return one
    if not known:
        raise ConfigError("no engine has used this cache yet, so its namespaces are unknown: start an engine first")
    described = [(one, one.fields) for one in known if one.fields]
    if not header.fields or not described:
        raise ConfigError("the pack belongs to none of the cache's namespaces, and their fields are unknown")
    ours = header.fields
    nearest, fields = min(described, key=lambda each: len(namespace_differences(ours, each[1])))
    differing = namespace_differences(ours, fields)
    shown = ", ".join(printable(name, 64) for name in differing[:_MAX_SHOWN_FIELDS])
    more = f" and {len(differing) - _MAX_SHOWN_FIELDS} more" if len(differing) > _MAX_SHOWN_FIELDS else ""
    called = printable(nearest.name, 64) or nearest.digest[:12]
    raise ConfigError(f"the pack is for another model than {called} here: {shown or 'the salt'}{more} differ")


def _check_fields(header: PackHeader) -> None:
    """Check that the fields' digest is the namespace; impossible with a salt, of which they have only a digest."""
    fields = header.fields
    if fields is None or fields.get("salt"):
        return
    if hashlib.sha256(_written(fields)).hexdigest() != header.namespace:
        raise ConfigError("the pack is damaged: its fields are not those of its namespace")


def _written(fields: Mapping[str, object]) -> bytes:
    """The fields encoded as in `NamespaceFields`."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
