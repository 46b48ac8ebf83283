"""What a caller asks for when a prefix is to stay longer than others: for how long, how much it matters, who pays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier.errors import ConfigError

MAX_TTL_S = 7 * 24 * 3600
MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 1, 50, 100
MAX_ACCOUNT_CHARS = 128


@dataclass(frozen=True, slots=True)
class Retention:
    """Blocks are not evicted for `ttl_s` seconds from now. They count towards `account`, a caller among an owner's.

    At most `account_units` may, or what the owner may have. Where that is used up, what the account has retained with a
    lower `priority` makes place.
    """

    ttl_s: float
    priority: int = DEFAULT_PRIORITY
    account: str = ""
    account_units: int | None = None

    def __post_init__(self) -> None:
        check_ttl("ttl_s", self.ttl_s)
        check_priority("priority", self.priority)
        if len(self.account) > MAX_ACCOUNT_CHARS:
            raise ConfigError(f"an account has a name of at most {MAX_ACCOUNT_CHARS} characters")
        if self.account_units is not None and self.account_units < 0:
            raise ConfigError("an account's limit must not be negative")


@dataclass(frozen=True, slots=True)
class Granted:
    """What came of it: the leading `num_blocks` of those that were asked for are retained for `ttl_s` seconds.

    `reason` is a sentence if that is less than was asked for.
    """

    num_blocks: int
    ttl_s: float
    reason: str = ""


def check_ttl(name: str, ttl_s: float) -> None:
    """Raises `ConfigError`, also for what is no number."""
    if not math.isfinite(ttl_s) or not 0 < ttl_s <= MAX_TTL_S:
        raise ConfigError(f"{name} must be above 0 and at most {MAX_TTL_S} seconds, not {ttl_s}")


def check_priority(name: str, priority: int) -> None:
    """Raises `ConfigError`."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise ConfigError(f"{name} must be from {MIN_PRIORITY} to {MAX_PRIORITY}, not {priority}")
