"""Why no more of recent prompts was cached, by request id; bounded. Owned by the engine's thread. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from kvtier.blocks.namespace import Namespace
from kvtier.engine.answer import cached_tokens_of
from kvtier.engine.parting.partings import Partings
from kvtier.engine.retentions import EngineRetentions
from kvtier.engine.schedule.request import Request
from kvtier.errors import InvalidParameter
from kvtier.tiers.explanation import Explanation, MatchEnd

_MAX_EXPLANATIONS = 4096
_EXPLAINED_TOKENS = 64
"""Tokens of a prompt that show whether another namespace has its first block, even one with larger blocks."""


class Explanations:
    """The explanations of one engine. Each is also passed to `note`."""

    def __init__(
        self,
        model: str,
        namespace: Namespace,
        block_tokens: int,
        note: Callable[[Explanation], None],
        partings: Partings,
        retentions: EngineRetentions,
    ) -> None:
        self._model = model
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._note = note
        self._partings = partings
        self._retentions = retentions
        self._known: OrderedDict[str, Explanation] = OrderedDict()

    def of(self, request_id: str) -> Explanation:
        """The explanation of one of the last few thousand requests. Raises `InvalidParameter` for others."""
        known = self._known.get(request_id)
        if known is None:
            raise InvalidParameter(f"no request with the id {request_id} has ended recently")
        return known

    def add(self, request: Request) -> None:
        """The request is over. One that warms is no client's: nobody asks why it missed, and no page lists it."""
        ending = request.prefetch.ending
        if ending is None or request.warms:
            return
        block_tokens = self._block_tokens
        detail, num_first = ending.detail, min(request.prompt_tokens, max(block_tokens, _EXPLAINED_TOKENS))
        if request.salt:  # whether it is cached without the salt, or with another, says nothing about this request
            num_first = 0
            if ending.reason is MatchEnd.NEVER_STORED:
                detail = "a cache_salt, or the API key, keeps its blocks apart"
        explanation = Explanation(
            request_id=request.id,
            model=self._model,
            namespace=self._namespace.hex(),
            prompt_tokens=request.prompt_tokens,
            block_tokens=block_tokens,
            cached_tokens=cached_tokens_of(request),
            ended_at_tokens=min(ending.position * block_tokens, request.prompt_tokens),
            reason=ending.reason,
            tier=ending.tier,
            detail=detail,
            first_tokens=tuple(request.tokens[:num_first]),
            parting=self._partings.noted(request.group),
            asked_at=self._partings.asked_at,
            retention=tuple(self._retentions.noted(request.group)) or msgspec.UNSET,
        )
        self._known[request.id] = explanation
        if request.index == 0:
            self._known[request.group] = explanation
        while len(self._known) > _MAX_EXPLANATIONS:
            self._known.popitem(last=False)
        self._note(explanation)
        if request.index == 0 and request.id != request.group:  # also by the id that the caller knows
            self._note(msgspec.structs.replace(explanation, request_id=request.group))
