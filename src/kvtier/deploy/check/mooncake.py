"""Checks before anything is started that a Mooncake pool answers, and that a block can be written and read."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

import msgspec

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError, TierError
from kvtier.stores.mooncake.blocks import MooncakeBlocks
from kvtier.stores.mooncake.config import MooncakeConfig, open_blocks

_ANSWER_S = 10.0
_BLOCK_BYTES = 4096


def notes_on_mooncake(config: MooncakeConfig) -> Iterator[str]:
    """A sentence if a small block cannot be written, read and removed. Takes seconds without an answer.

    This lends no memory: for a pool that has none apart from this host's, only the master is checked.
    """
    namespace = Namespace(uuid.uuid4().bytes * 2)
    try:
        asking = msgspec.structs.replace(config, memory=0, buffer=1 << 20)
        blocks = open_blocks(asking, namespace, _BLOCK_BYTES, lambda kind, count: None)
    except ConfigError as error:
        yield str(error)
        return
    with contextlib.closing(blocks):
        try:
            if not blocks.client.wait_until_ready(_ANSWER_S, first_word_only=True):
                yield f"Mooncake at {config.master} is not ready: {blocks.client.why_not}"
                return
            yield from _notes_on_blocks(blocks, config)
        except (ConfigError, TierError) as error:
            yield str(error)


def _notes_on_blocks(blocks: MooncakeBlocks, config: MooncakeConfig) -> Iterator[str]:
    block_hash = BlockHash(uuid.uuid4().bytes * 2)
    deadline = time.monotonic() + _ANSWER_S
    payload, into = bytes(block_hash) * (_BLOCK_BYTES // 32), bytearray(_BLOCK_BYTES)
    blocks.find([block_hash], deadline)
    if not all(blocks.put([block_hash], [memoryview(payload)], deadline)):
        if not config.memory:
            yield f"Mooncake at {config.master} did not take a block: no host lends memory to the pool, or it is full"
        return
    with memoryview(into) as target:
        arrived = blocks.get([block_hash], [target], deadline)
    blocks.drop([block_hash], deadline)
    if not all(arrived) or bytes(into) != payload:
        yield f"Mooncake at {config.master} does not give back what was written"
