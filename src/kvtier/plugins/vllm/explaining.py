"""How much of a request was cached, and why not more: recorded at the cache server for `kvtier explain`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from vllm.v1.request import Request

from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.plugins.vllm.identity import Identity
from kvtier.tiers.explanation import Explanation, MatchEnd

_EXPLAINED_TOKENS = 64
_RANDOM_END = re.compile(r"-[0-9a-f]{8}$")


class Explainer:
    """Explains the requests of one engine. Called by the scheduler's thread; never waits."""

    def __init__(self, client: CacheClient, identity: Identity) -> None:
        self._client = client
        self._identity = identity
        self._namespace = identity.fields.digest()

    def explain(
        self,
        request: Request,
        root: Namespace | None,
        num_local_tokens: int,
        counts: dict[str, int],
        reason: MatchEnd,
        ended_at_tokens: int,
    ) -> Explanation:
        """`counts` are the cached tokens by tier, without the `num_local_tokens` in vLLM's own cache."""
        is_salted = root not in (None, self._namespace)
        num_first = 0 if is_salted else min(request.num_prompt_tokens, _EXPLAINED_TOKENS)
        return Explanation(
            request_id=request.request_id,
            model=self._identity.name,
            namespace=self._namespace.hex(),
            prompt_tokens=request.num_prompt_tokens,
            block_tokens=self._identity.layout.block_tokens,
            cached_tokens={"device": num_local_tokens, **counts},
            ended_at_tokens=min(max(ended_at_tokens, num_local_tokens), request.num_prompt_tokens),
            reason=reason,
            tier="server",
            detail=self._detail(is_salted=is_salted),
            first_tokens=tuple(request.all_token_ids[:num_first]),
        )

    def _detail(self, *, is_salted: bool) -> str:
        """Why the request shares no blocks with others, if so, and the format of its blocks."""
        salted = "the request has a cache_salt, an adapter or other inputs of its own; " if is_salted else ""
        return f"{salted}{self._identity.description}"

    def note(self, explanation: Explanation) -> None:
        """Record it under vLLM's id of the request and the id that the client knows."""
        for request_id in dict.fromkeys(_ids_known_to_clients(explanation.request_id)):
            self._client.note(msgspec.structs.replace(explanation, request_id=request_id))


def _ids_known_to_clients(request_id: str) -> Iterator[str]:
    """vLLM's own id, and the ids its callers know: vLLM appends a random suffix to theirs.

    The first of several answers to one prompt (`0_...`), or of several prompts of one call (`...-0`), stands for all.
    """
    yield request_id
    given = _RANDOM_END.sub("", request_id)
    yield given
    given = given.removeprefix("0_")
    yield given
    yield given.removesuffix("-0")
