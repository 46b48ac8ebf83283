"""The scheduler's side of one request: its lookup, its pages, and what of it is saved. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.request import Request

from kvtier.blocks.hashing import BlockHash
from kvtier.tiers.explanation import Explanation
from kvtier.transfer.lookup import Lookup


@dataclass(slots=True)
class Tracked:
    """The cache's view of a request."""

    request: Request
    lookup: Lookup
    num_local_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    num_saved: int = 0
    has_saves: bool = False
    explanation: Explanation | None = None
    """Reported to the server when the request ends, because reporting costs the scheduler's thread time."""
    may_load: bool = True
    computes_last_page: bool = False
    """A prompt of full pages is loaded without the last one, although `whole_prompts` is on."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks to load or save: `pages` hold the blocks with these `hashes`, beginning at `first_block`."""

    pages: list[int]
    first_block: int
    hashes: list[BlockHash]
