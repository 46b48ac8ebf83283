"""Times as people write them."""

from __future__ import annotations

import pytest

from kvtier.durations import parse_duration
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7d", 604_800.0),
        ("12h", 43_200.0),
        ("90m", 5400.0),
        ("30s", 30.0),
        ("1.5 h", 5400.0),
        ("2w", 1_209_600.0),
        ("45", 45.0),
    ],
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "7 days", "-1d", "0s", "1e9d", "99999d", "1" * 100, "7d7h", "٣d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time"):
        parse_duration(text)
