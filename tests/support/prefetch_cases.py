"""Shared by the tests of prefetches as the scheduler sees them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.engine.schedule.request import Request
from kvtier.transfer.matching import TierMatch
from tests.support.engine_building import MANAGERS
from tests.support.tiered_engine import TieredEngine

every_manager = pytest.mark.parametrize("manager", MANAGERS)


def tokens_loaded(request: Request) -> int:
    return sum(request.prefetch.history.loaded_tokens.values())


def slow_matches(engine: TieredEngine, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[TierMatch]:
    """Each match takes so long from now on. Those that were made."""
    at_once = engine.traffic.match
    matched: list[TierMatch] = []

    def match(first: int, hashes: Sequence[BlockHash], num_more: int) -> TierMatch:
        engine.now += seconds
        matched.append(at_once(first, hashes, num_more))
        return matched[-1]

    monkeypatch.setattr(engine.traffic, "match", match)
    return matched
