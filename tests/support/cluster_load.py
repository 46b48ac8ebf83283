"""Traffic on a cluster's tier, for tests in which something happens to the cluster meanwhile."""

from __future__ import annotations

import random
import threading

from kvtier.testing.tier_contract import chain, fetch_all, payloads
from kvtier.tiers.cluster import ClusterTier
from tests.support.waiting import wait_until


class Load:
    """Threads that store and read, until they are told to stop. No wrong byte, and no error, ever."""

    def __init__(self, tier: ClusterTier, num_threads: int = 3) -> None:
        self._tier = tier
        self._is_over = threading.Event()
        self._wrong: list[str] = []
        self.num_read = 0
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(num_threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert self._wrong == []

    def _work(self, number: int) -> None:
        dice = random.Random(number)
        try:
            while not self._is_over.is_set():
                hashes = chain(dice.randrange(30), dice.randrange(1, 12))
                self._tier.offer(hashes, payloads(hashes))
                found = fetch_all(self._tier, hashes)
                self.num_read += len(found)
                if found != payloads(hashes)[: len(found)]:
                    self._wrong.append("wrong bytes")
        except Exception as error:
            self._wrong.append(repr(error))

    def wait_for_reads(self) -> None:
        before = self.num_read
        wait_until(lambda: self.num_read > before + 200 or self._wrong)
        assert not self._wrong
