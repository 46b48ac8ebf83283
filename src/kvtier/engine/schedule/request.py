"""One prompt on its way through the engine: its tokens, how many of them have KV, and what it still may do. No torch.

The engine's thread owns every request. A token that was sampled is at first only a number on the device: the request
counts it as `num_in_flight` and learns its id when the step's results are read.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import Block
from kvtier.engine.sampling_params import SamplingParams
from kvtier.transfer.prefetch import NoPrefetch, Prefetch

_NO_PREFETCH = NoPrefetch()


class Status(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class Times:
    """Seconds of one clock. Zero until it happened."""

    arrived_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def ttft_s(self) -> float:
        return self.first_token_at - self.arrived_at

    def time_per_output_token_s(self, num_tokens: int) -> float:
        """Of the tokens after the first; zero when there are none."""
        return (self.finished_at - self.first_token_at) / (num_tokens - 1) if num_tokens > 1 else 0.0


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of one request, in order, as its block manager keeps them.

    `ids` are what the runner needs; `blocks` are the pool's, for managers that have one. The first `num_shown` have
    been shown under their hashes, which are chained from `root`, once it is known. Of a long prompt that is looked for
    piece by piece no more than `max_hashes` are known for now. Up to `num_filled` tokens the KV was found, or computed
    before what was found: it is not written again. `version` changes when `ids` are not just longer than before.
    """

    ids: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    root: Namespace | None = None
    max_hashes: int | None = None
    num_shown: int = 0
    num_filled: int = 0
    version: int = 0

    def clear(self) -> None:
        """No blocks any more; the hashes stay true."""
        self.ids = []
        self.blocks = []
        self.num_shown = 0
        self.num_filled = 0
        self.version += 1


class Request:
    """`tokens` are the prompt and every output token whose id is known."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "client",
        "finish_reason",
        "group",
        "id",
        "index",
        "logprobs",
        "max_tokens",
        "num_computed",
        "num_in_flight",
        "num_preemptions",
        "params",
        "place",
        "prefetch",
        "prompt_tokens",
        "salt",
        "slot",
        "status",
        "times",
        "tokens",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        index: int = 0,
        group: str = "",
        salt: str = "",
        client: str = "",
        arrived_at: float | None = None,
    ) -> None:
        """`max_tokens` is how many may be sampled; `index` numbers the answers to one prompt of the group `group`.

        Requests share blocks if their `salt` is equal. Clients take turns where several have requests that wait:
        `client` is whoever asked, or the request's own group.
        """
        # As large as it is, since scheduler, block managers, sampler and answers read one record of a prompt.
        self.id = request_id
        self.index = index
        self.group = group or request_id
        self.salt = salt
        self.client = client or self.group
        self.place = 0
        """In the line of those that wait."""
        self.tokens = list(tokens)
        self.prompt_tokens = len(self.tokens)
        self.params = params
        self.max_tokens = max_tokens
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_preemptions = 0
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.blocks = SequenceBlocks()
        self.slot = 0
        self.cached_tokens = 0
        """On the device itself."""
        self.prefetch: Prefetch = _NO_PREFETCH
        """Its way through the tiers below the device, from when it waits on."""
        self.was_admitted = False
        self.logprobs: list[dict[int, float]] = []
        self.times = Times(arrived_at=time.monotonic() if arrived_at is None else arrived_at)

    def rewind(self) -> None:
        """Back to the queue with what it has said so far: without blocks, and without tokens on the device."""
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_preemptions += 1
        self.status = Status.WAITING
        self.blocks = SequenceBlocks(version=self.blocks.version + 1)
        self.prefetch = _NO_PREFETCH

    @property
    def num_tokens(self) -> int:
        """Known tokens and those on the device."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_there(self) -> int:
        """Tokens whose KV its blocks have. The last of them may be computed again, for what follows it."""
        return max(self.num_computed, self.blocks.num_filled)

    def fill(self, num_tokens: int) -> None:
        """The KV of its first `num_tokens` was found; of tokens that are all there the last is left to compute."""
        self.blocks.num_filled = num_tokens
        self.num_computed = min(num_tokens, len(self.tokens) - 1)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def may_sample(self) -> bool:
        """Another token may be sampled, as far as is known now."""
        return self.num_tokens - self.prompt_tokens < self.max_tokens

    def __repr__(self) -> str:
        return f"<Request {self.id}.{self.index} {self.status.name} {self.num_computed}/{self.num_tokens}>"
