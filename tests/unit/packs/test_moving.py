"""Blocks from one cache server into a pack, and from there into another one."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.namespace import NamespaceFields
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.client.client import CacheClient
from kvtier.client.connecting import connect
from kvtier.errors import ConfigError, TierFull
from kvtier.packs.form import PackHeader, PackReader, PackWriter
from kvtier.packs.moving import check_namespace, check_room, export_blocks, import_blocks
from kvtier.transport.address import UnixAddress
from tests.support.storing_engine import BLOCK_TOKENS, LAYOUT, fields_of, payload_of

FIELDS = fields_of()
HASHES = block_hashes(FIELDS.digest(), range(40 * BLOCK_TOKENS), BLOCK_TOKENS)


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[list[CacheClient]]:
    """Of two servers; the first one has the blocks."""
    opened: list[CacheClient] = []
    servers = []
    for name in ("a", "b"):
        config = CacheServerConfig(memory_bytes=1 << 20, unix=UnixAddress(str(tmp_path / f"{name}.sock")))
        servers.append(CacheServer(config))
        opened.append(connect(f"unix:{tmp_path / name}.sock", layout=LAYOUT, namespace=FIELDS, name="tiny"))
    opened[0].set(HASHES, [payload_of(one) for one in HASHES])
    yield opened
    for client in opened:
        client.close()
    for server in servers:
        server.close()


def header_of(client: CacheClient, hashes: list[BlockHash] = HASHES) -> PackHeader:
    known = client.namespaces()[0]
    return PackHeader(
        name="handbook",
        model="tiny",
        namespace=known.digest,
        root=known.digest,
        fields=known.fields,
        block_bytes=known.block_bytes,
        block_tokens=known.block_tokens,
        num_blocks=len(hashes),
        section_blocks=7,
        tokens=len(hashes) * BLOCK_TOKENS,
    )


def exported(client: CacheClient) -> bytes:
    header, file = header_of(client), io.BytesIO()
    moved: list[int] = []
    export_blocks(client, PackWriter(file, header, HASHES), header, HASHES, moved.append)
    assert sum(moved) == len(HASHES)
    return file.getvalue()


def test_a_pack_carries_blocks_to_another_server(clients: list[CacheClient]) -> None:
    source, target = clients
    reader = PackReader(io.BytesIO(exported(source)), "it")
    check_namespace(reader.header, target.namespaces())
    assert import_blocks(target, reader, lambda _: None) == len(HASHES)
    buffers = [bytearray(LAYOUT.block_bytes) for _ in HASHES]
    assert target.get(HASHES, buffers) == len(HASHES)
    assert [bytes(one) for one in buffers] == [payload_of(one) for one in HASHES]


def test_only_what_is_absent_is_stored(clients: list[CacheClient]) -> None:
    source, target = clients
    target.set(HASHES[:10], [payload_of(one) for one in HASHES[:10]])
    reader = PackReader(io.BytesIO(exported(source)), "it")
    assert import_blocks(target, reader, lambda _: None) == len(HASHES) - 10


def test_of_a_damaged_pack_nothing_stays(clients: list[CacheClient]) -> None:
    source, target = clients
    target.set(HASHES[:2], [payload_of(one) for one in HASHES[:2]])
    data = bytearray(exported(source))
    data[-3000] ^= 1  # in the last section
    with pytest.raises(ConfigError, match="is damaged"):
        import_blocks(target, PackReader(io.BytesIO(bytes(data)), "it"), lambda _: None)
    assert target.contains(HASHES) == [True, True] + [False] * (len(HASHES) - 2)


def test_of_a_pack_that_gets_no_name_nothing_stays(clients: list[CacheClient]) -> None:
    source, target = clients
    target.set(HASHES[:2], [payload_of(one) for one in HASHES[:2]])

    def refuse() -> None:
        assert all(target.contains(HASHES))
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        import_blocks(target, PackReader(io.BytesIO(exported(source)), "it"), lambda _: None, refuse)
    assert target.contains(HASHES) == [True, True] + [False] * (len(HASHES) - 2)


def test_a_cache_that_has_lost_a_block_gives_no_pack(clients: list[CacheClient]) -> None:
    source, _ = clients
    source.drop([HASHES[20]])
    with pytest.raises(ConfigError, match="block 20 is no longer in the cache"):
        exported(source)


def test_a_pack_without_room_is_refused_and_nothing_stays(
    clients: list[CacheClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.packs.moving._ROOM_S", 0.05)
    source, target = clients
    data = exported(source)
    others = block_hashes(FIELDS.digest(), range(7, 7 + 250 * BLOCK_TOKENS), BLOCK_TOKENS)
    for first in range(0, len(others), 50):
        part = others[first : first + 50]
        target.set(part, [bytes(LAYOUT.block_bytes)] * len(part))
    with target.match(others[:120]):
        held = connect(str(target.address), layout=LAYOUT, namespace=FIELDS)
        with held, held.match(others[120:230]), pytest.raises(TierFull, match=r"no room|too little room"):
            import_blocks(target, PackReader(io.BytesIO(data), "it"), lambda _: None)
    assert not any(target.contains(HASHES))


def test_a_pack_that_would_evict_blocks_is_refused_until_there_is_room(clients: list[CacheClient]) -> None:
    source, target = clients
    reader = PackReader(io.BytesIO(exported(source)), "it")
    check_room(target, reader)
    others = block_hashes(FIELDS.digest(), range(7, 7 + 240 * BLOCK_TOKENS), BLOCK_TOKENS)
    for first in range(0, len(others), 40):
        target.set(others[first : first + 40], [bytes(LAYOUT.block_bytes)] * 40)
    with pytest.raises(ConfigError, match="needs 160KiB, but only 64KiB of the memory is free: 96KiB of"):
        check_room(target, reader)
    target.set(HASHES[:16], [payload_of(one) for one in HASHES[:16]])
    target.drop(others[:24])
    check_room(target, reader)


class TinyCache:
    """Has room for four blocks, and makes it by evicting the oldest."""

    def __init__(self) -> None:
        self.held: list[BlockHash] = []

    def store(self, hashes: Sequence[BlockHash], blocks: object) -> list[int]:
        stored = [position for position, one in enumerate(hashes) if one not in self.held]
        self.held = [*self.held, *(hashes[position] for position in stored)][-4:]
        return stored

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return [one in self.held for one in hashes]

    def drop(self, hashes: Sequence[BlockHash]) -> int:
        self.held = [one for one in self.held if one not in hashes]
        return len(hashes)


def test_an_import_ends_where_blocks_of_a_section_evict_each_other(clients: list[CacheClient]) -> None:
    cache = TinyCache()
    reader = PackReader(io.BytesIO(exported(clients[0])), "it")
    with pytest.raises(TierFull, match="no room for blocks from 0 on"):
        import_blocks(cast(CacheClient, cache), reader, lambda _: None)
    assert not cache.held


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weights": "others"}, "for another model than tiny here: weights differ"),
        ({"model_config": {"layers": 1, "rope": {"theta": 5}}}, r"model_config\.rope\.theta differ"),
        ({"salt": "of a tenant"}, "salt differ"),
    ],
)
def test_a_pack_of_another_namespace_is_refused_with_the_field_that_differs(
    clients: list[CacheClient], changes: dict[str, object], sentence: str
) -> None:
    fields: NamespaceFields = replace(FIELDS, **changes)  # type: ignore[arg-type]
    header = header_of(clients[0])
    document = fields.document()
    other = PackHeader(**{**_values(header), "namespace": fields.digest().hex(), "fields": document})
    with pytest.raises(ConfigError, match=sentence):
        check_namespace(other, clients[1].namespaces())


def test_fields_that_are_not_those_of_the_namespace_are_refused(clients: list[CacheClient]) -> None:
    header = header_of(clients[0])
    assert header.fields is not None
    lying = PackHeader(**{**_values(header), "fields": {**header.fields, "weights": "others"}})
    with pytest.raises(ConfigError, match="its fields are not those of its namespace"):
        check_namespace(lying, clients[1].namespaces())
    larger = PackHeader(**{**_values(header), "block_bytes": 8192})
    with pytest.raises(ConfigError, match="block_bytes is 8192, but the cache's is 4096"):
        check_namespace(larger, clients[1].namespaces())
    with pytest.raises(ConfigError, match="no engine has used this cache yet"):
        check_namespace(header, [])


def _values(header: PackHeader) -> dict[str, object]:
    return {name: getattr(header, name) for name in header.__struct_fields__}
