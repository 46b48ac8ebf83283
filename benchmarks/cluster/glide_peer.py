"""valkey-glide, used as LMCache's connector does: asyncio, a batch of two keys for each block, a few blocks at a time.

A put copies into Python's `bytes`; a get copies out of them into the caller's buffers.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvtier.stores.valkey.node import NodeAddress

_NUM_AT_ONCE = 4
_METADATA = b"m" * 28


class GlidePeer:
    """A client with an event loop of its own, on a thread. Raises `ImportError` where glide is not installed."""

    def __init__(self, seeds: Sequence[NodeAddress]) -> None:
        glide: Any = importlib.import_module("glide")
        self._glide = glide
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        addresses = [glide.NodeAddress(seed.host, seed.port) for seed in seeds]
        config = glide.GlideClusterClientConfiguration(addresses, request_timeout=60_000)
        self._client: Any = self._run(glide.GlideClusterClient.create(config))

    def put(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        async def one(position: int) -> None:
            batch = self._glide.ClusterBatch(is_atomic=False)
            batch.set(f"{{{keys[position]}}}:kv_bytes", bytes(blocks[position]))
            batch.set(f"{{{keys[position]}}}:metadata", _METADATA)
            await self._client.exec(batch, raise_on_error=True)

        self._on_each(one, len(keys))

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> None:
        async def one(position: int) -> None:
            names = [f"{{{keys[position]}}}:metadata", f"{{{keys[position]}}}:kv_bytes"]
            metadata, payload = await self._client.mget(names)
            assert metadata == _METADATA
            into[position][:] = payload

        self._on_each(one, len(keys))

    def exists(self, keys: Sequence[str]) -> int:
        async def count() -> int:
            found = 0
            for key in keys:
                if not await self._client.exists([f"{{{key}}}:metadata"]):
                    break
                found += 1
            return found

        return int(self._run(count()))

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _on_each(self, act: Callable[[int], Awaitable[None]], count: int) -> None:
        async def all_of_them() -> None:
            left = iter(range(count))

            async def work() -> None:
                for position in left:
                    await act(position)

            await asyncio.gather(*(work() for _ in range(_NUM_AT_ONCE)))

        self._run(all_of_them())

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
