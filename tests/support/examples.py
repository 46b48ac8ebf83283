"""How many examples a property is tried with: all of them, or few in the short run of `make test`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SHORT_PROFILE = "short"
WHOLE_PROFILE = "whole"
_SHORT_PART = 10
_FEWEST = 5

_ON_A_BUSY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(WHOLE_PROFILE, _ON_A_BUSY_MACHINE)
settings.register_profile(SHORT_PROFILE, _ON_A_BUSY_MACHINE, max_examples=10, derandomize=True, database=None)


def examples(count: int) -> int:
    """Of `count` examples those that this run has: a tenth under the short profile, and at least a few."""
    if settings.get_current_profile_name() != SHORT_PROFILE:
        return count
    return min(count, max(_FEWEST, count // _SHORT_PART))
