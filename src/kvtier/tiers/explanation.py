"""Why a request's match ended where it did: the reason, the tier that gave it, and how much was cached up to there.

Each request's match makes one `Explanation`; the cache server keeps the latest ones; `kvtier explain` reads them back.
Values only: no I/O, safe on any thread.
"""

from __future__ import annotations

import msgspec

from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import ConfigError
from kvtier.tiers.parting import How, Parting
from kvtier.tiers.retention import RetentionOutcome

__all__ = ["Explanation", "MatchEnd"]

_WHY = {
    MatchEnd.ALL: "no full block was left",
    MatchEnd.NEVER_STORED: "the next block was never stored",
    MatchEnd.EVICTED: "the next block was stored once and has been evicted",
    MatchEnd.OTHER_NAMESPACE: "the next block is cached in another namespace only",
    MatchEnd.TIER_DOWN: "the tier did not answer",
    MatchEnd.SLOWER: "fetching more would have been slower than computing it",
    MatchEnd.PENDING: "the next block is still being written",
    MatchEnd.LIMIT: "this client holds as much as it may",
    MatchEnd.LOST: "the next block was lost or corrupt",
}


class Explanation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request's match. `cached_tokens` is by tier ("device", "host", "server", ...).

    `namespace` is a hex digest; the answer of `tier` ended the match at `ended_at_tokens`; `detail` adds to the reason.
    `first_tokens` are some of the prompt's first token ids, with which other namespaces can be asked later. `parting`
    tells where the prompt parted from earlier prompts of the same engine; the process at `asked_at` can tell more.
    `retention` has the outcomes of the caller's requests to retain the prompt, if any.
    """

    request_id: str
    model: str
    namespace: str
    prompt_tokens: int
    block_tokens: int
    cached_tokens: dict[str, int]
    ended_at_tokens: int
    reason: MatchEnd
    tier: str
    detail: str = ""
    first_tokens: tuple[int, ...] = ()
    parting: Parting | None = None
    asked_at: str = ""
    retention: tuple[RetentionOutcome, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise ConfigError(f"block_tokens must be positive, not {self.block_tokens}")
        if not 0 <= self.ended_at_tokens <= self.prompt_tokens:
            raise ConfigError(f"a match of {self.prompt_tokens} tokens cannot end at token {self.ended_at_tokens}")
        if min(self.cached_tokens.values(), default=0) < 0:
            raise ConfigError("cached tokens must not be negative")

    @classmethod
    def from_json(cls, text: str | bytes) -> Explanation:
        """Raises `ConfigError` for anything that `to_json` does not make."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ConfigError(f"this is not an explanation: {error}") from error

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    def sentence(self) -> str:
        """The explanation in one sentence, for people."""
        where = ", ".join(f"{count} from {tier}" for tier, count in self.cached_tokens.items() if count)
        cached = f"{sum(self.cached_tokens.values())} of {self.prompt_tokens} prompt tokens were cached"
        detail = f" ({self.detail})" if self.detail else ""
        tier = f" in the {self.tier} tier" if self.tier else ""
        return (
            f"{cached}{f' ({where})' if where else ''}; the match ended at token {self.ended_at_tokens}{tier} because "
            f"{_WHY[self.reason]}{detail}."
        )

    def retention_sentences(self) -> list[str]:
        """Sentences about the requested and the granted retention of the prompt; empty without a request."""
        return [] if self.retention is msgspec.UNSET else [outcome.sentence() for outcome in self.retention]

    def parting_sentences(self) -> list[str]:
        """Where the prompt parted from earlier ones, for people; empty if unknown."""
        if self.parting is None:
            return []
        found = [self.parting.sentence()]
        if self.parting.how is not How.NOTHING_RECORDED and self._is_lost:
            found.append(f"Some blocks of the {self.parting.token} tokens in common were never stored, or are gone.")
        return [*found, *self.parting.advice()]

    @property
    def _is_lost(self) -> bool:
        """Whether full blocks that the prompt shares with an earlier one were not found."""
        assert self.parting is not None
        num_found = max(self.ended_at_tokens, sum(self.cached_tokens.values()))
        return num_found < (self.parting.token // self.block_tokens) * self.block_tokens
