"""A request to retain a prefix longer than others: its duration, priority and account."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier.errors import ConfigError

MAX_TTL_S = 7 * 24 * 3600
MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 1, 50, 100
MAX_ACCOUNT_CHARS = 128


@dataclass(frozen=True, slots=True)
class Retention:
    """Retain blocks for `ttl_s` seconds from now. They count towards `account`, one of the owner's callers.

    The account may retain at most `account_units`, and never more than its owner. If that is used up, the account's
    retentions of lower `priority` make room.
    """

    ttl_s: float
    priority: int = DEFAULT_PRIORITY
    account: str = ""
    account_units: int | None = None

    def __post_init__(self) -> None:
        check_ttl("ttl_s", self.ttl_s)
        check_priority("priority", self.priority)
        if len(self.account) > MAX_ACCOUNT_CHARS:
            raise ConfigError(f"an account's name must have at most {MAX_ACCOUNT_CHARS} characters")
        if self.account_units is not None and self.account_units < 0:
            raise ConfigError("an account's limit must not be negative")


@dataclass(frozen=True, slots=True)
class Granted:
    """The outcome of a request: the leading `num_blocks` of its blocks are retained for `ttl_s` seconds.

    `reason` is a sentence if that is less than was requested.
    """

    num_blocks: int
    ttl_s: float
    reason: str = ""


def check_ttl(name: str, ttl_s: float) -> None:
    """Raises `ConfigError` for a time out of range, including NaN."""
    if not math.isfinite(ttl_s) or not 0 < ttl_s <= MAX_TTL_S:
        raise ConfigError(f"{name} must be above 0 and at most {MAX_TTL_S} seconds, not {ttl_s}")


def check_priority(name: str, priority: int) -> None:
    """Raises `ConfigError` for a priority out of range."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise ConfigError(f"{name} must be from {MIN_PRIORITY} to {MAX_PRIORITY}, not {priority}")
