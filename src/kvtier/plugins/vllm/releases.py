"""The releases of vLLM that the connector supports. Imports nothing from vLLM."""

from __future__ import annotations

import enum
import re

OLDEST = (0, 29)
NEWEST = (0, 32)

_RANGE = f"vLLM {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"


class ReleaseFit(enum.Enum):
    """How a release of vLLM compares with those the connector is tested with."""

    TESTED = enum.auto()
    OLDER = enum.auto()
    NEWER = enum.auto()
    """Or a build without a version number."""


def release_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version; a version without numbers counts as newer than all."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    is_unnamed = re.match(r"0\.[01]\.(dev|post)", version)  # built from sources without tags
    if numbers is None or is_unnamed:
        return (NEWEST[0] + 1, 0)
    return int(numbers[1]), int(numbers[2])


def fit_of(version: str) -> ReleaseFit:
    release = release_of(version)
    if release < OLDEST:
        return ReleaseFit.OLDER
    return ReleaseFit.NEWER if release > NEWEST else ReleaseFit.TESTED


def tried(version: str) -> str:
    """The warning about a newer release that is tried."""
    return f"kvtier is tested with {_RANGE}; trying vLLM {version}"


def refused(version: str, why: str = "") -> str:
    """The warning about a release that is too old, or whose interface does not fit."""
    return f"kvtier works with {_RANGE}, not {version}: nothing is cached{f' ({why})' if why else ''}"
