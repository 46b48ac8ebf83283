"""Sizes in deployment files."""

from __future__ import annotations

import pytest

from kvtier.deploy.file.size import read_size
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [(20, 20 << 30), (0.5, 1 << 29), (0, 0), ("20GiB", 20 << 30), ("512 MiB", 512 << 20), ("100b", 100)],
)
def test_a_plain_number_is_gib_and_text_has_its_unit(given: object, nbytes: int) -> None:
    assert read_size(given) == nbytes


@pytest.mark.parametrize(
    "given", ["20", "1.5", " 7 ", "", "20GB", "lots", -1, True, None, float("nan"), float("inf"), 1 << 40, [1]]
)
def test_what_is_no_size_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        read_size(given)
