"""The namespaces of a server, with their blocks in memory. Under the catalog's lock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES, slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import Block, PrefixIndex
from kvtier.cacheserver.namespace_descriptions import NamespaceDescriptions
from kvtier.errors import TierRefused
from kvtier.sizes import format_size
from kvtier.stores.disk import StoreSpace

Hashes: TypeAlias = Sequence[BlockHash]


class MemoryBlock(Block):
    """A block in the arena. `is_stored`: the disk has it too; `is_wanted`: it was to be written there.

    `checksum` is over key and payload, once computed.
    """

    __slots__ = ("checksum", "is_queued", "is_stored", "is_wanted")

    def __init__(self, start: int, size: int) -> None:
        super().__init__(start, size)
        self.checksum: int | None = None
        self.is_stored = False
        self.is_queued = False
        self.is_wanted = False


class MemorySpace:
    """One namespace's blocks in memory. `num_users` connections have it open."""

    def __init__(self, number: int, namespace: Namespace, name: str, block_bytes: int, block_tokens: int) -> None:
        self.number = number
        self.namespace = namespace
        self.name = name
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.index = PrefixIndex(slot_bytes_of(block_bytes) // SLOT_ALIGN_BYTES)
        self.num_users = 0


class Namespaces:
    """Every namespace that is in use or has blocks in memory. A number is never given twice."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._numbers = itertools.count(1)
        self._spaces: dict[Namespace, MemorySpace] = {}
        self.descriptions = NamespaceDescriptions()

    def __len__(self) -> int:
        return len(self._spaces)

    def __iter__(self) -> Iterator[MemorySpace]:
        return iter(self._spaces.values())

    def get(self, namespace: Namespace) -> MemorySpace | None:
        return self._spaces.get(namespace)

    def open(self, namespace: Namespace, name: str, block_bytes: int, block_tokens: int, fields: str) -> MemorySpace:
        space = self._spaces.get(namespace)
        if space is None:
            if slot_bytes_of(block_bytes) > self._memory_bytes:
                raise TierRefused(
                    f"a block of {format_size(block_bytes)} does not fit into this server's "
                    f"{format_size(self._memory_bytes)}"
                )
            space = MemorySpace(next(self._numbers), namespace, name, block_bytes, block_tokens)
            self._spaces[namespace] = space
        if space.block_bytes != block_bytes:
            raise TierRefused(
                f"namespace {namespace.hex()[:12]} ({space.name or 'unnamed'}) has blocks of {space.block_bytes} "
                f"bytes here; this client says {block_bytes}"
            )
        space.num_users += 1
        if fields:
            self.descriptions.keep(namespace, fields)
        return space

    def forget_if_empty(self, space: MemorySpace) -> None:
        if not space.num_users and not len(space.index) and self._spaces.get(space.namespace) is space:
            del self._spaces[space.namespace]

    def forget_unused(self, stored: Sequence[StoreSpace]) -> None:
        """Forget what is neither in memory, nor in use, nor among the `stored`."""
        for space in list(self._spaces.values()):
            self.forget_if_empty(space)
        self.descriptions.forget_all_but({*self._spaces, *(space.namespace for space in stored)})

    def describe(self, stored: Sequence[StoreSpace]) -> dict[Namespace, dict[str, object]]:
        """Every namespace in memory or among the `stored`, for people."""
        found = {space.namespace: _described(space, len(space.index), space.num_users) for space in self}
        for space in stored:
            found.setdefault(space.namespace, _described(space, 0, 0))["disk_blocks"] = len(space.index)
        return found


def _described(space: MemorySpace | StoreSpace, num_blocks: int, num_users: int) -> dict[str, object]:
    return {
        "namespace": space.namespace.hex(),
        "name": space.name,
        "block_bytes": space.block_bytes,
        "block_tokens": space.block_tokens,
        "blocks": num_blocks,
        "used_bytes": num_blocks * slot_bytes_of(space.block_bytes),
        "connections": num_users,
        "disk_blocks": 0,
    }
