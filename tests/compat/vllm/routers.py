"""A router, as far as an engine's events concern it: it hears what is where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm import LLM
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from tests.compat.vllm.engines import ask_one, tokens_of, wait_until

Place = tuple[int | None, Any]
"""A group and a block's hash."""


class Router:
    """Hears an engine's events, and knows from them which blocks are where: `held` has groups and hashes by medium."""

    def __init__(self, folder: Path, name: str = "events") -> None:
        self.endpoint = f"ipc://{folder}/{name}"
        self.held: dict[str | None, set[Place]] = {}
        self.blocks: dict[str | None, dict[Place, tuple[Any, list[int]]]] = {}
        self.stored: list[BlockStored] = []
        self.num_cleared = 0
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(self.endpoint)
        self._socket.subscribe(b"")

    @property
    def config(self) -> KVEventsConfig:
        return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=self.endpoint)

    def listen(self) -> None:
        while self._socket.poll(0):
            for event in self._decoder.decode(self._socket.recv_multipart()[-1]).events:
                self._hear(event)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _hear(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held, self.blocks = {}, {}
            self.num_cleared += 1
            return
        held = self.held.setdefault(event.medium, set())
        places = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        if isinstance(event, BlockRemoved):
            assert held >= places, "removed what was not there"
            held -= places
            return
        assert isinstance(event, BlockStored)
        self.stored.append(event)
        held |= places
        parent = event.parent_block_hash
        for number, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            self.blocks.setdefault(event.medium, {})[event.group_idx, block_hash] = (parent, tokens)
            parent = block_hash


def meets(llm: LLM, router: Router) -> None:
    """What an engine publishes before its router has connected is lost: wait until it hears of a reset."""

    def is_heard() -> bool:
        llm.reset_prefix_cache()
        ask_one(llm, tokens_of(5, seed=99), max_tokens=1)
        router.listen()
        return router.num_cleared > 0

    wait_until(is_heard, "the router connected")


def hears(llm: LLM, router: Router, is_so: Callable[[], bool], what: str) -> None:
    """Events come with steps, so that the engine is asked something short until `is_so`."""

    def is_heard() -> bool:
        ask_one(llm, tokens_of(5, seed=99), max_tokens=1)
        router.listen()
        return is_so()

    wait_until(is_heard, what)


@contextmanager
def two_routers(folder: Path) -> Iterator[tuple[Router, Router]]:
    """One for each engine: what an engine leaves of its socket is in the way of the next."""
    routers = Router(folder), Router(folder, "more-events")
    yield routers
    for router in routers:
        router.close()
    zmq.Context.instance().destroy(linger=0)  # the engines', which they leave open
