"""The checksum of a block: over its key and its bytes, so that the right bytes under the wrong key do not pass."""

from __future__ import annotations

import xxhash

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace


def start_checksum(namespace: Namespace, block_hash: BlockHash) -> xxhash.xxh3_64:
    """A digest that takes the payload, in pieces of any size."""
    digest = xxhash.xxh3_64(namespace)
    digest.update(block_hash)
    return digest


def checksum_of(namespace: Namespace, block_hash: BlockHash, payload: memoryview) -> int:
    """The 64-bit checksum of a block. Releases the GIL for all but tiny payloads."""
    digest = start_checksum(namespace, block_hash)
    digest.update(payload)
    return digest.intdigest()
