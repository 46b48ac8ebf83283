"""A prompt that is to stay cached: what its caller asked for, and what the tiers granted. Values only: any thread.

The HTTP server makes a `RetentionAsk` of what a body says; an engine asks its tiers and makes a `RetentionOutcome` of
what they say, which the answer's usage and `kvtier explain` show.
"""

from __future__ import annotations

import msgspec

from kvtier.blocks.retention import DEFAULT_PRIORITY, check_priority, check_ttl

MAX_ASKS = 8
"""Of one prompt."""


class RetentionAsk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Keep a prompt for `ttl_s` seconds, or, of a conversation, its first `num_messages` messages.

    It counts towards `account`, which may have `account_bytes` retained; 0 is no limit but the engine's own.
    """

    ttl_s: float
    priority: int = DEFAULT_PRIORITY
    num_messages: int | None = None
    account: str = ""
    account_bytes: int = 0

    def __post_init__(self) -> None:
        check_ttl("ttl_s", self.ttl_s)
        check_priority("priority", self.priority)


class RetentionOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`asked_tokens` of a prompt, in full blocks, were to stay for `asked_ttl_s`; `tier` keeps `granted_tokens`.

    `reason` is a sentence if that is less than was asked for.
    """

    asked_tokens: int
    asked_ttl_s: float
    priority: int
    granted_tokens: int = 0
    granted_ttl_s: float = 0.0
    tier: str = ""
    reason: str = ""

    def shown(self) -> dict[str, object]:
        """As every API shows it."""
        found: dict[str, object] = {
            "asked": {"tokens": self.asked_tokens, "ttl_s": self.asked_ttl_s, "priority": self.priority},
            "granted": {"tokens": self.granted_tokens, "ttl_s": self.granted_ttl_s, "tier": self.tier},
        }
        return found | {"reason": self.reason} if self.reason else found

    def sentence(self) -> str:
        """For people."""
        asked = f"{self.asked_tokens} tokens were to be retained for {self.asked_ttl_s:g} s (priority {self.priority})"
        if not self.granted_tokens:
            return f"{asked}, and none are{self._why()}."
        tier = f" in the {self.tier} tier" if self.tier else ""
        return f"{asked}; {self.granted_tokens} are, for {self.granted_ttl_s:g} s{tier}{self._why()}."

    def _why(self) -> str:
        return f": {self.reason}" if self.reason else ""
