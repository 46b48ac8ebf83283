"""What of a prompt is to stay cached, as bodies ask for it and as a key may have it. Values only.

Bodies are read without knowing whose they are; what a key may have, and what holds for bodies that ask for nothing,
is added where the prompt is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvtier.blocks.retention import DEFAULT_PRIORITY
from kvtier.tiers.retention import RetentionAsk, RetentionOutcome

_LEAST_BUDGET_BYTES = 1
"""Of a key that may retain nothing: 0 is no limit of its own."""


class RetentionWish(msgspec.Struct, frozen=True, array_like=True):
    """`parts` are seconds and how many of a conversation's messages they are about, or all of the prompt.

    With `is_declined` the body says that nothing is to be kept, whatever holds for others.
    """

    parts: list[tuple[float, int | None]] = []
    priority: int | None = None
    is_declined: bool = False


NO_WISH = RetentionWish()
DECLINED = RetentionWish(is_declined=True)


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Of one key: how long prompts are kept that say nothing of it (0: as others), and how much may be kept."""

    default_s: float = 0.0
    priority: int = DEFAULT_PRIORITY
    max_bytes: int | None = None

    def asks(self, wish: RetentionWish, account: str) -> list[RetentionAsk]:
        """What an engine is asked for."""
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
    """Those of one prompt; those of several as one."""
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
