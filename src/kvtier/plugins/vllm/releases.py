"""Which releases of vLLM the connector is for. Imports nothing of vLLM's."""

from __future__ import annotations

import enum
import re

OLDEST = (0, 29)
NEWEST = (0, 32)

_RANGE = f"vLLM {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"


class Fit(enum.Enum):
    """How a release of vLLM stands to those that the connector was tested with."""

    TESTED = enum.auto()
    OLDER = enum.auto()
    NEWER = enum.auto()
    """Or one that does not say which it is."""


def release_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version; what has none is newer than all."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    is_unnamed = re.match(r"0\.[01]\.(dev|post)", version)  # built from sources without tags
    if numbers is None or is_unnamed:
        return (NEWEST[0] + 1, 0)
    return int(numbers[1]), int(numbers[2])


def fit_of(version: str) -> Fit:
    release = release_of(version)
    if release < OLDEST:
        return Fit.OLDER
    return Fit.NEWER if release > NEWEST else Fit.TESTED


def tried(version: str) -> str:
    """What is said of a newer release that is tried."""
    return f"kvtier was tested with {_RANGE}, and this is {version}: it is tried"


def refused(version: str, why: str = "") -> str:
    """What is said of a release that is not tried, or with which it does not work."""
    return f"kvtier works with {_RANGE}, and this is {version}: nothing is cached{f' ({why})' if why else ''}"
