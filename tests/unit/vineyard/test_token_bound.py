"""When a listing of the tree from before may still be relied on."""

from __future__ import annotations

import pytest

from kvtier.vineyard.token_bound import _Counts

_BEFORE = _Counts(10, 20, ((0,), (0,)), ((0, 100.0, 500), (1, 200.0, 70)))


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (((0, 100.2, 500), (1, 199.9, 70)), 0),
        (((0, 100.0, 510), (1, 200.0, 75)), 15),
        (((0, 100.0, 510),), None),
        (((0, 100.0, 510), (2, 200.0, 75)), None),
        (((0, 350.0, 510), (1, 200.0, 75)), None),
        (((0, 100.4, 3), (1, 200.0, 75)), None),
    ],
    ids=["nothing", "some", "one is away", "another answers", "started anew", "counts anew"],
)
def test_what_was_stored_since_is_known_of_the_same_servers_only(
    stored: tuple[tuple[int, float, int], ...], expected: int | None
) -> None:
    assert _Counts(10, 20, ((0,), (0,)), stored).num_stored_since(_BEFORE) == expected


def test_nothing_is_known_of_servers_that_were_away_meanwhile() -> None:
    assert _Counts(10, 20, ((0,), (1,)), _BEFORE.stored).num_stored_since(_BEFORE) is None
