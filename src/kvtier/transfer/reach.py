"""How far back the layers of a model look, and where a prefix can be resumed. No torch.

A model may keep its KV in several *groups* of layers, each in blocks of its own size. Full attention looks back to the
first token, a sliding window at some tokens, chunked attention to the start of its chunk, and a recurrent layer only at
the state after the token before. A prefix can be resumed at a boundary where every group has the blocks it reaches.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class AttentionKind(enum.Enum):
    """What a token looks back at. The values are shown to users."""

    FULL = "full attention"
    WINDOW = "a sliding window"
    CHUNK = "chunked attention"
    STATE = "a state"


@dataclass(frozen=True, slots=True)
class Reach:
    """The reach of a group with blocks of `block_tokens`. `span_tokens` is the size of its window or of its chunks."""

    attention: AttentionKind
    block_tokens: int
    span_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.block_tokens > 0
        assert (self.span_tokens > 0) == (self.attention in (AttentionKind.WINDOW, AttentionKind.CHUNK))

    def first_block(self, num_tokens: int) -> int:
        """The first block that the token after `num_tokens` may look at; `num_tokens` must end a block."""
        end = num_tokens // self.block_tokens
        if self.attention is AttentionKind.FULL:
            return 0
        if self.attention is AttentionKind.STATE:
            return max(0, end - 1)
        if self.attention is AttentionKind.CHUNK:
            return num_tokens // self.span_tokens * self.span_tokens // self.block_tokens
        # A token sees itself and those before it in the window.
        return max(0, (num_tokens - self.span_tokens + 1) // self.block_tokens)


def longest_resumable(
    groups: Sequence[tuple[Reach, Sequence[bool]]], unit_tokens: int, max_tokens: int, first_token: int = 0
) -> int:
    """The last boundary, a multiple of `unit_tokens` up to `max_tokens`, where every group has all blocks it reaches.

    Each group comes with the presence of its blocks; those before `first_token` need not be present. 0 if there is
    none.
    """
    runs = [_run_starts(present, first_token // reach.block_tokens) for reach, present in groups]
    for num_tokens in range(max_tokens // unit_tokens * unit_tokens, first_token, -unit_tokens):
        for (reach, _), starts in zip(groups, runs, strict=True):
            end = num_tokens // reach.block_tokens
            if end >= len(starts) or starts[end] > reach.first_block(num_tokens):
                break
        else:
            return num_tokens
    return 0


def _run_starts(present: Sequence[bool], first: int) -> list[int]:
    """For each end, where the run of present blocks before it begins; blocks before `first` count as present."""
    starts = [0]
    for number, is_present in enumerate(present):
        starts.append(starts[-1] if is_present or number < first else number + 1)
    return starts
