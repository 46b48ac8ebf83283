"""Blocks that were to go to disk and did not: the client that committed them is told at its next flush."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TypeAlias

from kvtier.blocks.pool import Block
from kvtier.cacheserver.served_client import ServedClient

Refused: TypeAlias = Counter[tuple[str, str]]
"""How many blocks, by tenant and reason."""


class Refusals:
    """Counted since the start. Called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Refused = Counter()
        self._told: Refused = Counter()

    def note(self, block: Block, reason: str, count: int = 1) -> None:
        """`count` blocks of the tenant of `block` are not on disk."""
        with self._lock:
            self._refused[block.index.share.name, reason] += count

    def welcome(self, client: ServedClient) -> None:
        """A new client is told of refusals from now on, and of those not reported yet."""
        with self._lock:
            if client.refusals_heard is None:
                client.refusals_heard = self._told.copy()

    def tell(self, client: ServedClient) -> str:
        """Why blocks of its tenant are not on disk since it last asked, as a sentence; empty when all are."""
        tenant = client.tenant
        reasons: Counter[str] = Counter()
        with self._lock:
            heard = Counter() if client.refusals_heard is None else client.refusals_heard
            for key, count in self._refused.items():
                if count > heard[key] and (tenant.sees_all or key[0] == tenant.name):
                    reasons[key[1]] += count - heard[key]
                    heard[key] = self._told[key] = count
            client.refusals_heard = heard
        return "; ".join(f"{count} blocks are not on disk: {reason}" for reason, count in reasons.items())
