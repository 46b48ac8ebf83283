"""What one step of the engine computes, as the scheduler decided and the runner reads it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.engine.schedule.request import Request
from kvtier.transfer.copier import Copies


@dataclass(slots=True)
class StepRow:
    """`count` tokens of `request` from position `start`. `samples` when they reach its last token."""

    request: Request
    start: int
    count: int
    samples: bool

    @property
    def writes(self) -> bool:
        """Not a token whose KV was found, which is computed for what follows it: that is a row of its own."""
        return self.start >= self.request.blocks.num_filled


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Before the step, the first tokens of block `source` go to block `target`."""

    source: int
    target: int


@dataclass(slots=True)
class Step:
    """Rows of one query come first, the order the attention kernels want. `copies` come before everything.

    Each layer of `arrivals` is there before that layer is computed.
    """

    rows: list[StepRow] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_tokens: int = 0
    arrivals: list[Copies] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.rows
