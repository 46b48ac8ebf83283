"""Blocks between a cache server and a pack: a section is read while the one before it is written."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import namespace_differences
from kvtier.client.client import CacheClient
from kvtier.client.known_namespace import KnownNamespace
from kvtier.errors import ConfigError, TierFull
from kvtier.observe.printable import printable
from kvtier.packs.form import PackHeader, PackReader, PackWriter, Section

_NUM_BUFFERS = 2
_MAX_SHOWN_FIELDS = 5
_ROOM_S = 30.0
_MAX_ROUNDS = 16
"""In which a section is stored: a cache that makes room for one block with another would go on for ever."""
_LOOK_S = 0.05

Advance = Callable[[int], None]
"""Told of how many blocks were moved."""


def export_blocks(
    client: CacheClient, writer: PackWriter, header: PackHeader, hashes: Sequence[BlockHash], advance: Advance
) -> None:
    """Write all of them. Raises `ConfigError` if the cache has lost some, `OSError` as the file does."""
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
    """A server may give fewer at a time than are asked for: it lends no client more than a share of its memory."""
    views = [into[number * block_bytes : (number + 1) * block_bytes] for number in range(len(hashes))]
    done = 0
    while done < len(hashes):
        got = client.get(hashes[done:], views[done:])
        if not got:
            raise ConfigError(f"block {first + done} is not in the cache any more, or cannot be read: warm it again")
        done += got
    return into[: len(hashes) * block_bytes]


def import_blocks(client: CacheClient, reader: PackReader, advance: Advance) -> int:
    """Store all blocks that the cache lacks, and wait until they are as durable as it makes them. Returns how many.

    Raises `ConfigError` for a pack that is not whole, `TierFull` if there is no room. What was stored is dropped then.
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
        if num_kept < header.num_blocks:  # the first ones had to leave for the last ones
            raise TierFull(f"the cache has kept {num_kept} of {header.num_blocks} blocks: it has too little room")
    except BaseException:
        client.drop(stored)
        raise
    return len(stored)


def _store(client: CacheClient, hashes: Sequence[BlockHash], section: Section) -> list[BlockHash]:
    """Those that were absent. Waits for room while the server writes to its disk. Raises `TierFull`.

    Blocks that are stored, and gone at the next look, may have been evicted by those after them.
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
    """The namespace of a cache that the pack is for. Raises `ConfigError` that names the fields which differ."""
    _check_fields(header)
    for one in known:
        if one.digest == header.namespace:
            for field in ("block_bytes", "block_tokens"):
                if getattr(one, field) != getattr(header, field):
                    raise ConfigError(
                        f"the pack has {getattr(header, field)} as {field}, and the cache {getattr(one, field)}"
                    )
            return one
    if not known:
        raise ConfigError("no engine has used this cache yet: start one, so that it is known what its blocks are")
    described = [(one, one.fields) for one in known if one.fields]
    if not header.fields or not described:
        raise ConfigError("the pack is of another namespace than those here, and what they cover is not known")
    ours = header.fields
    nearest, fields = min(described, key=lambda each: len(namespace_differences(ours, each[1])))
    differing = namespace_differences(ours, fields)
    shown = ", ".join(printable(name, 64) for name in differing[:_MAX_SHOWN_FIELDS])
    more = f" and {len(differing) - _MAX_SHOWN_FIELDS} more" if len(differing) > _MAX_SHOWN_FIELDS else ""
    called = printable(nearest.name, 64) or nearest.digest[:12]
    raise ConfigError(f"the pack is for another model than {called} here: {shown or 'the salt'}{more} differ")


def _check_fields(header: PackHeader) -> None:
    """Fields that do not give the namespace are not its own. With a salt, of which they have a digest, none do."""
    fields = header.fields
    if fields is None or fields.get("salt"):
        return
    if hashlib.sha256(_written(fields)).hexdigest() != header.namespace:
        raise ConfigError("the pack is damaged: its fields are not those of its namespace")


def _written(fields: Mapping[str, object]) -> bytes:
    """As `NamespaceFields` writes them."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
