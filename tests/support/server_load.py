"""Threads that use several cache servers above one cluster at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.testing.tier_contract import chain, empty_buffers, payloads
from tests.support.waiting import wait_until

_NUM_THREADS = 3
_NUM_PROMPTS = 400
_NUM_STORES = 60


def got(client: CacheClient, hashes: list[BlockHash]) -> list[bytes]:
    """The leading blocks that the server has."""
    into = empty_buffers(len(hashes))
    return [bytes(buffer) for buffer in into[: client.get(hashes, into)]]


class ServerLoad:
    """Threads that `store` through some clients and read through others. Wrong bytes, and errors, end the test."""

    def __init__(self, clients: Sequence[CacheClient], store: Callable[[CacheClient, list[BlockHash]], None]) -> None:
        self._clients = clients
        self._store = store
        self._is_over = threading.Event()
        self._wrong: list[str] = []
        self._num_stored = 0
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(_NUM_THREADS)]

    def __enter__(self) -> ServerLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert self._wrong == []

    def wait_for_stores(self) -> None:
        before = self._num_stored
        wait_until(lambda: self._num_stored > before + _NUM_STORES or self._wrong)
        assert not self._wrong

    def _work(self, number: int) -> None:
        dice = random.Random(number)
        try:
            while not self._is_over.is_set():
                hashes = chain(1000 + dice.randrange(_NUM_PROMPTS), dice.randrange(1, 12))
                self._store(dice.choice(self._clients), hashes)
                found = got(dice.choice(self._clients), hashes)
                if found != payloads(hashes)[: len(found)]:
                    self._wrong.append("wrong bytes")
                self._num_stored += 1
        except Exception as error:
            self._wrong.append(repr(error))
