"""The checks of formats are strict: answers that follow schemas are judged by them."""

from __future__ import annotations

import jsonschema
import pytest

from tests.support.json_formats import format_checker

GOOD_AND_BAD = {
    "date": (["2024-02-29", "0000-01-01"], ["2024-02-30", "2023-04-31", "2024-1-1"]),
    "date-time": (
        ["2024-02-29T23:59:60Z", "2024-02-29t00:00:00.5+23:59"],
        ["2024-02-30T00:00:00Z", "2024-02-29", "2024-02-29T24:00:00Z", "2024-02-29T00:00:00"],
    ),
    "time": (["00:00:00Z", "23:59:60.25-01:00"], ["24:00:00Z", "00:00:00", "1:00:00Z"]),
    "duration": (["P1Y2M3DT4H5M6S", "P2W", "PT5M", "P1M"], ["P", "PT", "P1H", "P1Y2D", "1D", "P1W2D"]),
    "email": (["a@b"], ["ab"]),
    "hostname": (["a", "a-1.example"], ["", "-a", "a..b", "a_b", "a" * 64]),
    "ipv4": (["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    "ipv6": (["::1", "2001:db8::8:800:200c:417a"], ["12345::", "::1::"]),
    "uri": (["a:b", "https://example.org/%7Ea?b#c", "urn:x:[1]"], ["/a", "a b:c", "http://a/%zz", "1a:b"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "123e4567e89b12d3a456426614174000"]),
}


@pytest.mark.parametrize("name", GOOD_AND_BAD)
def test_a_format_is_told_from_what_is_none(name: str) -> None:
    good, bad = GOOD_AND_BAD[name]
    validator = jsonschema.Draft202012Validator({"format": name}, format_checker=format_checker())

    assert [value for value in good if not validator.is_valid(value)] == []
    assert [value for value in bad if validator.is_valid(value)] == []
    assert validator.is_valid(5)
