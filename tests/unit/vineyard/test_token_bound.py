"""When a listing of the tree from before may still be relied on."""

from __future__ import annotations

import pytest

from kvtier.vineyard.token_bound import _Counts

_BEFORE = _Counts(10, 20, num_returns=0, began_at=100.0, num_stored=500)


@pytest.mark.parametrize(
    ("num_returns", "began_at", "num_stored", "expected"),
    [
        (0, 100.2, 500, 0),
        (0, 99.9, 515, 15),
        (0, 350.0, 510, None),
        (0, 100.4, 3, None),
        (1, 100.0, 510, None),
    ],
    ids=["nothing", "some", "started anew", "counts anew", "was away"],
)
def test_what_was_stored_since_is_known_of_the_same_server_only(
    num_returns: int, began_at: float, num_stored: int, expected: int | None
) -> None:
    assert _Counts(10, 20, num_returns, began_at, num_stored).num_stored_since(_BEFORE) == expected
