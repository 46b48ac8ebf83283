"""The error tree is the one drawn at the top of the file."""

from __future__ import annotations

import inspect

import pytest

from kvtier import errors

PARENTS = {
    "KvtierError": "Exception",
    "ConfigError": "KvtierError",
    "CapacityError": "KvtierError",
    "PoolExhausted": "CapacityError",
    "TierFull": "CapacityError",
    "TierError": "KvtierError",
    "TierTimeout": "TierError",
    "TierUnavailable": "TierError",
    "TierRefused": "TierError",
    "ProtocolError": "KvtierError",
    "LocalProtocolError": "ProtocolError",
    "RemoteProtocolError": "ProtocolError",
    "LeaseError": "KvtierError",
}


def error_classes() -> dict[str, type]:
    return {name: found for name, found in vars(errors).items() if inspect.isclass(found)}


def test_every_error_has_the_parent_it_is_drawn_under() -> None:
    assert {name: found.__bases__[0].__name__ for name, found in error_classes().items()} == PARENTS


def test_every_error_is_in_the_drawing() -> None:
    drawing = errors.__doc__ or ""

    assert [name for name in error_classes() if name not in drawing] == []


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
