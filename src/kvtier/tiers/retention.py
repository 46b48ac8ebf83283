"""Requests to retain a prompt, and what the tiers granted. Values only: safe on any thread.

The HTTP server makes a `RetentionAsk` from a request's body. An engine asks its tiers, and makes a `RetentionOutcome`
from their answers, which the answer's usage and `kvtier explain` show.
"""

from __future__ import annotations

import msgspec

from kvtier.blocks.retention import DEFAULT_PRIORITY, check_priority, check_ttl

MAX_ASKS = 8
"""The limit for one prompt."""


class RetentionAsk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Retain a prompt, or the first `num_messages` messages of a conversation, for `ttl_s` seconds.

    It counts towards `account`, which may retain at most `account_bytes`; with 0, only the engine's own limit applies.
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
    """`asked_tokens` of a prompt, in full blocks, were to be retained for `asked_ttl_s`; `tier` keeps `granted_tokens`.

    `reason` is a sentence if that is less than was requested.
    """

    asked_tokens: int
    asked_ttl_s: float
    priority: int
    granted_tokens: int = 0
    granted_ttl_s: float = 0.0
    tier: str = ""
    reason: str = ""

    def shown(self) -> dict[str, object]:
        """The outcome as every API shows it."""
        found: dict[str, object] = {
            "asked": {"tokens": self.asked_tokens, "ttl_s": self.asked_ttl_s, "priority": self.priority},
            "granted": {"tokens": self.granted_tokens, "ttl_s": self.granted_ttl_s, "tier": self.tier},
        }
        return found | {"reason": self.reason} if self.reason else found

    def sentence(self) -> str:
        """The outcome in one sentence, for people."""
        asked = f"{self.asked_tokens} tokens were to be retained for {self.asked_ttl_s:g} s (priority {self.priority})"
        if not self.granted_tokens:
            return f"{asked}, and none are{self._why()}."
        tier = f" in the {self.tier} tier" if self.tier else ""
        return f"{asked}; {self.granted_tokens} are, for {self.granted_ttl_s:g} s{tier}{self._why()}."

    def _why(self) -> str:
        return f": {self.reason}" if self.reason else ""
