"""What one step of the engine computes, as decided by the scheduler and read by the runner. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.engine.schedule.request import Request
from kvtier.transfer.copier import Copies


@dataclass(slots=True)
class StepRow:
    """`count` tokens of `request` from position `start`. `samples` if they reach its last token.

    `scores` if the log-probabilities of the prompt's next tokens were requested.
    """

    request: Request
    start: int
    count: int
    samples: bool
    scores: bool = False

    @property
    def writes(self) -> bool:
        """False for a hit token that is computed only for what follows it: it is a row of its own."""
        return self.start >= self.request.blocks.num_filled


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Before the step, the first tokens of block `source` are copied to block `target`."""

    source: int
    target: int


@dataclass(slots=True)
class Step:
    """Rows of one query come first, in the order the attention kernels want. `copies` come before everything.

    Each layer of `arrivals` arrives before that layer is computed.
    """

    rows: list[StepRow] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_tokens: int = 0
    arrivals: list[Copies] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.rows
