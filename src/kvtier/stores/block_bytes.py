"""The bytes of a disk store's blocks: in the payloads' file, as ciphertext if there is a cipher, and verified.

Thread-safe: it keeps no state of its own. The caller's reference on a block keeps the block's place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from kvtier.errors import BlockCorrupt
from kvtier.memory.checksum import checksum_of
from kvtier.stores.files import BlockCipher, NotAuthentic
from kvtier.stores.payload_file import PayloadFile
from kvtier.stores.records import BlockRecord
from kvtier.stores.stored_block import StoredBlock, StoreSpace

MAX_SEALED_BYTES = 1 << 30
"""A larger block cannot be encrypted."""


class BlockBytes:
    """Writes and reads blocks, and translates between blocks and their records."""

    def __init__(
        self, payloads: PayloadFile, cipher: BlockCipher | None, lose: Callable[[StoredBlock, str], None]
    ) -> None:
        """`lose` is called with each block that is not intact, and the kind of damage."""
        self._payloads = payloads
        self._cipher = cipher
        self._lose = lose

    def write(self, space: StoreSpace, blocks: Sequence[StoredBlock], payloads: list[memoryview]) -> None:
        with contextlib.ExitStack() as stack:
            if (cipher := self._cipher) is not None:
                for position, block in enumerate(blocks):
                    staging = stack.enter_context(cipher.staged(space.slot_bytes))
                    payload = payloads[position][: space.block_bytes]
                    block.seal = cipher.seal(space.about(block.hash), payload, staging, space.slot_bytes)
                    payloads[position] = stack.enter_context(staging[: space.slot_bytes])
            self._payloads.write([block.start for block in blocks], payloads, space.block_bytes, space.slot_bytes)

    def read(self, blocks: Sequence[StoredBlock], into: Sequence[memoryview]) -> list[BlockCorrupt | None]:
        """Fill `into`; None for each intact block, or the reason why it is not."""
        space = blocks[0].space
        try:
            if self._cipher is not None:
                return [self._opened(block, view, self._cipher) for block, view in zip(blocks, into, strict=True)]
            self._payloads.read([block.start for block in blocks], into, space.block_bytes, space.slot_bytes)
        except OSError as error:
            if len(blocks) > 1:  # find out which one failed
                return [self.read([block], [view])[0] for block, view in zip(blocks, into, strict=True)]
            self._lose(blocks[0], "unreadable")
            return [BlockCorrupt(f"a block on disk cannot be read: {error.strerror or error}")]
        return [self._verified(block, view) for block, view in zip(blocks, into, strict=True)]

    def record_of(self, block: StoredBlock) -> BlockRecord:
        space = block.space
        return BlockRecord(
            space.namespace,
            block.hash,
            block.start,
            space.block_bytes,
            space.block_tokens,
            block.sequence,
            block.used_at,
            self._masked(block.checksum, block.seal),
            space.name,
            block.is_pinned,
            block.seal,
        )

    def block_of(self, number: int, record: BlockRecord, space: StoreSpace) -> StoredBlock:
        block = StoredBlock(record.start, space.index.block_units)
        block.hash = record.hash
        block.index = space.index
        block.space = space
        block.record = number
        block.seal = record.seal
        block.checksum = self._masked(record.checksum, record.seal) if record.seal else record.checksum
        block.sequence = record.sequence
        block.used_at = record.used_at
        block.is_pinned = record.is_pinned
        return block

    def opens(self, record: BlockRecord, cipher: BlockCipher) -> bool:
        """Whether a ciphertext was made with the key of `cipher`."""
        space = StoreSpace(record.namespace, "", record.block_bytes, record.block_tokens, None)
        try:
            into = memoryview(bytearray(space.block_bytes))
            with cipher.staged(space.slot_bytes) as staging, staging[: space.slot_bytes] as slot:
                self._payloads.read([record.start], [slot], space.block_bytes, space.slot_bytes)
                cipher.open(record.seal, space.about(record.hash), staging, into)
        except (OSError, MemoryError, NotAuthentic):
            return False
        return True

    def _opened(self, block: StoredBlock, into: memoryview, cipher: BlockCipher) -> BlockCorrupt | None:
        """Fill `into` from ciphertext. Raises `OSError`."""
        space = block.space
        with cipher.staged(space.slot_bytes) as staging, staging[: space.slot_bytes] as slot:
            self._payloads.read([block.start], [slot], space.block_bytes, space.slot_bytes)
            try:
                cipher.open(block.seal, space.about(block.hash), staging, into[: space.block_bytes])
            except NotAuthentic as error:
                self._lose(block, "not authentic")
                return BlockCorrupt(f"block {block.hash.hex()[:12]} on disk is not authentic: {error}")
        return self._verified(block, into)

    def _masked(self, checksum: int, seal: bytes) -> int:
        """The checksum as in the record of a ciphertext, and back."""
        return self._cipher.masked(checksum, seal) if seal and self._cipher is not None else checksum

    def _verified(self, block: StoredBlock, payload: memoryview) -> BlockCorrupt | None:
        space = block.space
        found = checksum_of(space.namespace, block.hash, payload[: space.block_bytes])
        if found == block.checksum:
            return None
        self._lose(block, "corrupt")
        return BlockCorrupt(
            f"block {block.hash.hex()[:12]} has checksum {found:016x} on disk, not {block.checksum:016x}"
        )
