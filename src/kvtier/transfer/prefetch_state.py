"""How far a prefetch is, its verdict, and why its match ended. Values only; `prefetch` makes them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvtier.blocks.match_end import MatchEnd
from kvtier.transfer.matching import TierMatch
from kvtier.transfer.prompt_blocks import PromptBlocks


class PrefetchState(enum.Enum):
    """How far a prompt's prefetch has come."""

    UNASKED = enum.auto()
    MATCHING = enum.auto()
    """The tiers were asked. Their answer is unknown yet, or none of it is being loaded."""
    LOADING = enum.auto()
    """Blocks come from the front, or blocks of the device are being taken for that."""
    MEETING = enum.auto()
    """Blocks come from the back while the front is computed."""
    FINISHED = enum.auto()
    """Loading is finished."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How much of a prompt may be computed now: nothing, at most `num_tokens`, or all that is left."""

    may_compute: bool
    num_tokens: int | None = None


WAIT = Verdict(False)
READY = Verdict(True)


@dataclass(frozen=True, slots=True)
class MatchEnding:
    """Why no more of a prompt was cached: `tier` gave `reason` for the block at `position`."""

    position: int
    reason: MatchEnd
    tier: str
    detail: str = ""


@dataclass(slots=True)
class History:
    """What was done for a prompt. Times are `time.monotonic`, zero until the event first happens.

    `loaded_spans` has the first and the end of each run of loaded blocks. `loaded_tokens` is by source tier, and counts
    until the prompt first gives up its blocks.
    """

    asked_at: float = 0.0
    answered_at: float = 0.0
    load_began_at: float = 0.0
    load_ended_at: float = 0.0
    loaded_spans: list[tuple[int, int]] = field(default_factory=list)
    loaded_tokens: dict[str, int] = field(default_factory=dict)


def ending_of(match: TierMatch, blocks: PromptBlocks) -> MatchEnding:
    """What ended the match of a prompt for which no more is loaded."""
    block_tokens = blocks.block_tokens
    position = blocks.num_filled // block_tokens
    # Loading from the back leaves out the block of the last token, whether it was a hit or not.
    before_last = (blocks.num_tokens - 1) // block_tokens
    if position >= (before_last if match.has_all else blocks.num_wanted):
        return MatchEnding(position, MatchEnd.ALL, "")
    left = next((span for span in match.spans if span.end > position), None)
    if left is None:
        ending = match.ending
        return MatchEnding(max(position, ending.position), ending.ended, ending.tier)
    if left.first <= position:
        return MatchEnding(position, MatchEnd.SLOWER, left.tier)
    return MatchEnding(position, MatchEnd.LOST, "device", "evicted while the request waited")
