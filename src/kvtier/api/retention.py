"""Which part of a prompt is to stay cached: the wish in a body, and the rules for an API key. Values only.

Bodies are read without knowledge of their key; the key's limits and defaults are added when a prompt is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvtier.blocks.retention import DEFAULT_PRIORITY
from kvtier.tiers.retention import RetentionAsk, RetentionOutcome

_LEAST_BUDGET_BYTES = 1
"""The budget of a key that may retain nothing: 0 would mean no limit."""


class RetentionWish(msgspec.Struct, frozen=True, array_like=True):
    """Each of `parts` has seconds and a number of leading messages to keep; None for the whole prompt.

    With `is_declined` the body asks that nothing be kept, regardless of defaults.
    """

    parts: list[tuple[float, int | None]] = []
    priority: int | None = None
    is_declined: bool = False


NO_WISH = RetentionWish()
DECLINED = RetentionWish(is_declined=True)


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The rules for one key: how long prompts without a wish are kept (0: not retained), and the limit in bytes."""

    default_s: float = 0.0
    priority: int = DEFAULT_PRIORITY
    max_bytes: int | None = None

    def asks(self, wish: RetentionWish, account: str) -> list[RetentionAsk]:
        """The retention that an engine is asked for."""
        parts = wish.parts
        if not parts and not wish.is_declined and self.default_s:
            parts = [(self.default_s, None)]
        budget = 0 if self.max_bytes is None else max(_LEAST_BUDGET_BYTES, self.max_bytes)
        return [
            RetentionAsk(
                ttl_s=ttl_s,
                priority=self.priority if wish.priority is None else wish.priority,
                num_messages=num_messages,
                account=account,
                account_bytes=budget,
            )
            for ttl_s, num_messages in parts
        ]


ANYTHING = RetentionRules()


def combined(of_prompts: Sequence[Sequence[RetentionOutcome]]) -> list[RetentionOutcome]:
    """The outcomes of one prompt; those of several prompts combined into one."""
    if len(of_prompts) == 1:
        return list(of_prompts[0])
    found = [outcome for outcomes in of_prompts for outcome in outcomes]
    if not found:
        return []
    granted = [outcome for outcome in found if outcome.granted_tokens]
    return [
        RetentionOutcome(
            asked_tokens=sum(outcome.asked_tokens for outcome in found),
            asked_ttl_s=max(outcome.asked_ttl_s for outcome in found),
            priority=max(outcome.priority for outcome in found),
            granted_tokens=sum(outcome.granted_tokens for outcome in granted),
            granted_ttl_s=min((outcome.granted_ttl_s for outcome in granted), default=0.0),
            tier=granted[0].tier if granted else "",
            reason=next((outcome.reason for outcome in found if outcome.reason), ""),
        )
    ]
