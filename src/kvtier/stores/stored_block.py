"""A block of a disk store: its place in the file, the contents of its record, and its namespace's space. No I/O."""

from __future__ import annotations

from kvtier.blocks.block import Block, PrefixIndex
from kvtier.blocks.ghosts import scope_of
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.share import Share
from kvtier.stores.records import UNIT_BYTES


class StoredBlock(Block):
    """A block's place in the file, and the contents of its record."""

    __slots__ = ("checksum", "record", "seal", "sequence", "space", "used_at")

    space: StoreSpace
    record: int
    checksum: int
    sequence: int
    used_at: int
    seal: bytes


class StoreSpace:
    """One namespace's blocks in a store."""

    def __init__(
        self, namespace: Namespace, name: str, block_bytes: int, block_tokens: int, share: Share | None
    ) -> None:
        self.namespace = namespace
        self.name = name
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.slot_bytes = slot_bytes_of(block_bytes)
        self.index = PrefixIndex(self.slot_bytes // UNIT_BYTES, share, scope_of(namespace))

    def about(self, block_hash: BlockHash) -> bytes:
        """The associated data that binds a ciphertext to its block."""
        return b"".join((self.namespace, block_hash, self.block_bytes.to_bytes(8, "little")))
