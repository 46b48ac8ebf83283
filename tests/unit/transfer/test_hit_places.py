"""Tokens by where they came from: a cluster below a server is told from its disk and from a server over TCP."""

from __future__ import annotations

import pytest

from kvtier.transfer.hit_places import named_parts, place_of, tokens_by_tier
from kvtier.transfer.load_news import Loaded


@pytest.mark.parametrize(
    ("in_memory", "stored_in", "counted"),
    [
        (64, "disk", {"server": 64, "disk": 0}),
        (64, "cluster", {"server": 64, "disk": 0}),
        (16, "disk", {"server": 16, "disk": 48}),
        (16, "cluster", {"server": 16, "disk": 0, "cluster": 48}),
        (0, "cluster", {"server": 0, "disk": 0, "cluster": 64}),
    ],
)
def test_what_is_not_in_memory_counts_where_it_is_read_from(
    in_memory: int, stored_in: str, counted: dict[str, int]
) -> None:
    assert tokens_by_tier(in_memory, 64, stored_in) == counted


def test_a_load_that_had_to_be_read_is_named_after_where_the_match_found_it() -> None:
    parts = [Loaded("server", 10, 0.1), Loaded("disk", 20, 0.2)]

    assert named_parts(parts, "disk") == parts
    assert named_parts(parts, "cluster") == [parts[0], Loaded("cluster", 20, 0.2)]
    assert named_parts([Loaded("tcp", 5, 0.1)], "cluster") == [Loaded("tcp", 5, 0.1)]


def test_every_tier_has_a_place() -> None:
    assert [place_of(tier) for tier in ("server", "disk", "cluster", "tcp")] == ["memory", "disk", "cluster", "tcp"]
