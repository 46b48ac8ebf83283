"""Blocks that should be on disk and are not: a client's next flush reports those of its tenant."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TypeAlias

from kvtier.blocks.block import Block
from kvtier.cacheserver.served_client import ServedClient

Refused: TypeAlias = Counter[tuple[str, str]]
"""Number of blocks, by tenant and reason."""


class Refusals:
    """Counts refusals since the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Refused = Counter()
        self._told: Refused = Counter()

    def note(self, block: Block, reason: str, count: int = 1) -> None:
        """Note that `count` blocks of the tenant of `block` did not get to disk."""
        with self._lock:
            self._refused[block.index.share.name, reason] += count

    def start_reporting(self, client: ServedClient) -> None:
        """Start to report to a new client: refusals from now on, and those not yet reported to any client."""
        with self._lock:
            if client.refusals_reported is None:
                client.refusals_reported = self._told.copy()

    def report(self, client: ServedClient) -> str:
        """A sentence on the refusals of its tenant's blocks since the client last asked; empty if there were none."""
        tenant = client.tenant
        reasons: Counter[str] = Counter()
        with self._lock:
            reported = Counter() if client.refusals_reported is None else client.refusals_reported
            for key, count in self._refused.items():
                if count > reported[key] and (tenant.sees_all or key[0] == tenant.name):
                    reasons[key[1]] += count - reported[key]
                    reported[key] = self._told[key] = count
            client.refusals_reported = reported
        return "; ".join(f"{count} blocks are not on disk: {reason}" for reason, count in reasons.items())
