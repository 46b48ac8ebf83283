"""How many examples a property is tried with: all of them, or few in the short run of `make test`.

In CI the examples are the same every time, so that a result is that of the change under test. Every other whole run
draws new ones, and those it fails with come first the next time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SHORT_PROFILE = "short"
WHOLE_PROFILE = "whole"
_SHORT_PART = 10
_FEWEST = 5

_ON_A_BUSY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
_THE_SAME_EACH_TIME = settings(_ON_A_BUSY_MACHINE, derandomize=True, database=None)
settings.register_profile(WHOLE_PROFILE, _THE_SAME_EACH_TIME if os.environ.get("CI") == "true" else _ON_A_BUSY_MACHINE)
settings.register_profile(SHORT_PROFILE, _THE_SAME_EACH_TIME, max_examples=10)


def examples(count: int) -> int:
    """The number of examples of this run: `count`, or under the short profile a tenth of it, but at least a few."""
    if settings.get_current_profile_name() != SHORT_PROFILE:
        return count
    return min(count, max(_FEWEST, count // _SHORT_PART))
