"""One prompt in the engine: its tokens, how many of them have KV, and what it still may do. No torch.

The engine's thread owns every request. A sampled token is at first only a number on the device: the request counts it
in `num_in_flight`, and learns its id when the step's results are read.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.blocks.block import Block
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.engine.prompt_token import PromptToken
from kvtier.engine.sampling_params import SamplingParams
from kvtier.transfer.prefetch import NoPrefetch, Prefetch

_NO_PREFETCH = NoPrefetch()


class Status(enum.Enum):
    """The state of a request."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEAD_END = "dead_end"
    """Its grammar allows neither another token nor an end."""


@dataclass(slots=True)
class Times:
    """Seconds of one clock. Zero until the event."""

    arrived_at: float = 0.0
    prefill_at: float = 0.0
    """When its first tokens were scheduled to be computed."""
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def ttft_s(self) -> float:
        return self.first_token_at - self.arrived_at

    def time_per_output_token_s(self, num_tokens: int) -> float:
        """Average for the tokens after the first; zero if there are none."""
        return (self.finished_at - self.first_token_at) / (num_tokens - 1) if num_tokens > 1 else 0.0


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of one request, in order, as its block manager keeps them.

    The runner uses `ids`; `blocks` are the pool's, for managers that have one. The first `num_shown` are visible under
    their hashes, which are chained from `root`, once it is known. For a long prompt that is matched in pieces, at most
    `max_hashes` are known for now. Up to `num_filled` tokens, the KV was a hit, or computed before a hit: it is not
    written again. `version` changes when `ids` change other than by growing.
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
        """Drop the blocks; the hashes stay valid."""
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
        "num_scores_told",
        "params",
        "place",
        "prefetch",
        "prompt_scores",
        "prompt_tokens",
        "salt",
        "slot",
        "status",
        "times",
        "tokens",
        "warms",
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
        warms: bool = False,
    ) -> None:
        """`max_tokens` is how many may be sampled; `index` numbers the answers to one prompt of the group `group`.

        Requests share blocks if their `salt` is equal. If several clients have waiting requests, they take turns:
        `client` names the caller; by default, the request's group counts as one. A request that `warms` is for the
        tiers below the device: they are offered all of its prompt.
        """
        # As large as it is, since scheduler, block managers, sampler and answers share one record of a prompt.
        self.id = request_id
        self.index = index
        self.group = group or request_id
        self.salt = salt
        self.client = client or self.group
        self.warms = warms
        self.place = 0
        """The place in the waiting line."""
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
        """Prompt tokens that were cached on the device itself."""
        self.prefetch: Prefetch = _NO_PREFETCH
        """The request's way through the tiers below the device, from when it begins to wait."""
        self.was_admitted = False
        self.logprobs: list[dict[int, float]] = []
        self.prompt_scores: list[PromptToken] = []
        """The known ones, if they were requested."""
        self.num_scores_told = 0
        if self.wants_prompt_scores:
            self.prompt_scores.append(PromptToken(self.tokens[0], 0, {}))
        self.times = Times(arrived_at=time.monotonic() if arrived_at is None else arrived_at)

    def rewind(self) -> None:
        """Return to the queue with its tokens so far: without blocks, and without tokens on the device."""
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_preemptions += 1
        self.status = Status.WAITING
        self.blocks = SequenceBlocks(version=self.blocks.version + 1)
        self.prefetch = _NO_PREFETCH

    @property
    def wants_prompt_scores(self) -> bool:
        """All answers share one prompt, so only the first reports its scores."""
        return self.params.prompt_logprobs is not None and not self.index

    @property
    def lacks_prompt_scores(self) -> bool:
        """All of the prompt has to be computed, even if it is cached."""
        return self.wants_prompt_scores and len(self.prompt_scores) < self.prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens and those on the device."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_there(self) -> int:
        """Tokens whose KV is in its blocks. The last of them may be computed again, for what follows it."""
        return max(self.num_computed, self.blocks.num_filled)

    def fill(self, num_tokens: int) -> None:
        """The KV of its first `num_tokens` is available; if that is all tokens, the last is still computed."""
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
        """As far as is known now, another token may be sampled."""
        return self.num_tokens - self.prompt_tokens < self.max_tokens

    def __repr__(self) -> str:
        return f"<Request {self.id}.{self.index} {self.status.name} {self.num_computed}/{self.num_tokens}>"
