"""The error tree is the one drawn at the top of the file."""

from __future__ import annotations

import inspect
import re

import pytest

from kvtier import errors


def error_classes() -> dict[str, type]:
    return {name: found for name, found in vars(errors).items() if inspect.isclass(found)}


def drawn_parents() -> dict[str, str]:
    """Each name in the drawing and the one it hangs under."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ((?:[│ ]   )*(?:[├└]── )?)(\w+)\b", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents[found[2]] = path[depth - 1] if depth else "Exception"
    return parents


def test_every_error_has_the_parent_it_is_drawn_under() -> None:
    assert {name: found.__bases__[0].__name__ for name, found in error_classes().items()} == drawn_parents()


@pytest.mark.parametrize(
    ("error", "parent"),
    [
        (errors.ConfigError, errors.KvtierError),
        (errors.TierFull, errors.CapacityError),
        (errors.TierTimeout, errors.TierError),
        (errors.TierUnavailable, errors.TierError),
        (errors.TierRefused, errors.TierError),
        (errors.LocalProtocolError, errors.ProtocolError),
        (errors.RemoteProtocolError, errors.ProtocolError),
        (errors.LeaseError, errors.KvtierError),
    ],
)
def test_what_callers_catch_catches_its_kinds(error: type[Exception], parent: type[Exception]) -> None:
    assert issubclass(error, parent)
    assert issubclass(parent, errors.KvtierError)


def test_a_wrong_setting_is_also_a_value_error() -> None:
    assert issubclass(errors.ConfigError, ValueError)


def test_a_full_tier_is_no_failed_tier() -> None:
    assert not issubclass(errors.TierFull, errors.TierError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.TierError, "error"),
        (errors.TierTimeout, "timeout"),
        (errors.TierUnavailable, "unavailable"),
        (errors.TierRefused, "refused"),
    ],
)
def test_a_tiers_failure_carries_the_label_of_its_counter(error: type[errors.TierError], kind: str) -> None:
    assert error("why").kind == kind


def test_no_two_kinds_of_failure_share_a_label() -> None:
    labels = [found.kind for found in error_classes().values() if issubclass(found, errors.TierError)]

    assert len(set(labels)) == len(labels)
