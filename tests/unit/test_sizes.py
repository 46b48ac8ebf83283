"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("7B", 7),
        ("1KiB", 1 << 10),
        ("512MiB", 512 << 20),
        ("20GiB", 20 << 30),
        ("1.5TiB", 3 << 39),
        ("0.5KiB", 512),
        (" 20 gib ", 20 << 30),
        (8192, 8192),
    ],
)
def test_a_size_is_a_number_and_a_binary_unit(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "20GB", "20 Gi", "-1GiB", "1e3", "1.GiB", "1,5GiB", "20GiB!", "1 2KiB"])
def test_what_is_not_a_size_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size") as caught:
        parse_size(text)

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.4B", 0, -1], ids=repr)
def test_nothing_is_not_a_size(text: str | int) -> None:
    with pytest.raises(ConfigError, match="more than nothing"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (20 << 30, "20GiB"),
        (3 << 39, "1.5TiB"),
        (5000 << 40, "5000TiB"),
        ((1 << 30) + (1 << 20), "1GiB"),
    ],
)
def test_a_size_is_written_in_its_largest_unit_with_at_most_two_decimals(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(1, 1 << 50))
def test_a_written_size_reads_back_within_half_a_percent(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.006)


def test_plain_bytes_are_exact_however_many() -> None:
    assert parse_size(str((1 << 53) + 1)) == (1 << 53) + 1


def test_a_number_without_bounds_is_not_a_size() -> None:
    with pytest.raises(ConfigError):
        parse_size("9" * 400 + "TiB")


@pytest.mark.parametrize("text", ["9" * 1_000_000, " " * 1_000_000 + "!", "1" + " " * 1_000_000 + "!", 10**4000])
def test_what_is_far_too_long_is_refused_with_a_short_sentence(text: str | int) -> None:
    with pytest.raises(ConfigError, match="is not a size") as caught:
        parse_size(text)

    assert len(str(caught.value)) < 200
