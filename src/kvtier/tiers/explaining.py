"""Why a prompt misses, asked of running cache servers; and what an engine noted of a request, with a second look.

Asking has no side effects: no lease, no change in the order of eviction, no load from disk. Callable from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvtier.blocks.hashing import block_hashes
from kvtier.blocks.namespace import Namespace, NamespaceFields, namespace_differences
from kvtier.client.client import CacheClient
from kvtier.client.known_namespace import KnownNamespace
from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.wire.messages import LISTED_CACHED, LISTED_CLUSTER, LISTED_MEMORY, match_end_of

_TIER = "server"
_MAX_NAMED_FIELDS = 8
_FOUND = LISTED_CACHED | LISTED_CLUSTER


def explain(
    client: CacheClient, fields: NamespaceFields, tokens: Sequence[int], *, request_id: str = "", model: str = ""
) -> Explanation:
    """How much of a prompt the servers of `client` hold, in memory, on disk and in a cluster, and why not more.

    `client` needs no layout and no namespace. Raises `TierError` when no server answers.
    """
    namespace = fields.digest()
    block_tokens = fields.layout.block_tokens
    flags = client.presence(namespace, block_hashes(namespace, tokens, block_tokens))
    num_cached = _leading(flags)
    num_in_memory = sum(bool(flag & LISTED_MEMORY) for flag in flags[:num_cached])
    num_shared = sum(bool(flag & LISTED_CLUSTER) for flag in flags[:num_cached])
    explanation = Explanation(
        request_id=request_id,
        model=model,
        namespace=namespace.hex(),
        prompt_tokens=len(tokens),
        block_tokens=block_tokens,
        cached_tokens={
            "memory": num_in_memory * block_tokens,
            "disk": (num_cached - num_in_memory - num_shared) * block_tokens,
            **({"cluster": num_shared * block_tokens} if num_shared else {}),
        },
        ended_at_tokens=num_cached * block_tokens,
        reason=MatchEnd.ALL if num_cached == len(flags) else match_end_of(flags[num_cached]),
        tier=_TIER,
        first_tokens=tuple(map(int, tokens[:block_tokens])),
    )
    return _with_other_namespaces(client, explanation, tokens, fields.document())


def explain_request(client: CacheClient, request_id: str) -> Explanation | None:
    """An engine's note on a request; None if there is no such note, or it was pushed out.

    If the first block was never stored, it is looked up in other namespaces now. Raises `TierError` if no server
    answers, and `ConfigError` for a note that is no explanation.
    """
    text = client.noted(request_id)
    if text is None:
        return None
    explanation = Explanation.from_json(text)
    if explanation.ended_at_tokens:
        return explanation
    return _with_other_namespaces(client, explanation, explanation.first_tokens, None)


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A namespace that holds more of the same tokens. `differs_in` is None when one side's fields are not known."""

    known: KnownNamespace
    cached_tokens: int
    differs_in: list[str] | None

    def __str__(self) -> str:
        name = f"{self.known.name or 'unnamed'} ({self.known.digest[:12]})"
        return f"{self.cached_tokens} of these tokens are cached as {name}, {self._difference()}"

    def _difference(self) -> str:
        if not self.differs_in:
            return "whose fields are unknown"
        named = ", ".join(self.differs_in[:_MAX_NAMED_FIELDS])
        num_more = len(self.differs_in) - _MAX_NAMED_FIELDS
        return f"which differs in {named}" + (f" and {num_more} more fields" if num_more > 0 else "")


def _with_other_namespaces(
    client: CacheClient, explanation: Explanation, tokens: Sequence[int], fields: Mapping[str, object] | None
) -> Explanation:
    """The same, unless the block that was never stored is cached in another namespace. `fields` are our own."""
    if explanation.reason is not MatchEnd.NEVER_STORED:
        return explanation
    known = client.namespaces()
    own = next((each for each in known if each.digest == explanation.namespace), None)
    if fields is None:
        fields = None if own is None else own.fields
    found: list[_Elsewhere] = []
    for each in known:
        if each.digest == explanation.namespace:
            continue
        num_tokens = _cached_tokens(client, each.namespace, tokens, each.block_tokens)
        if num_tokens > explanation.ended_at_tokens:
            is_known = fields is not None and each.fields is not None
            differs_in = namespace_differences(fields or {}, each.fields or {}) if is_known else None
            found.append(_Elsewhere(each, num_tokens, differs_in))
    if not found:
        return explanation
    nearest = min(found, key=lambda each: (-each.cached_tokens, each.differs_in is None, len(each.differs_in or ())))
    return msgspec.structs.replace(explanation, reason=MatchEnd.OTHER_NAMESPACE, detail=str(nearest))


def _cached_tokens(client: CacheClient, namespace: Namespace, tokens: Sequence[int], block_tokens: int) -> int:
    hashes = block_hashes(namespace, tokens, block_tokens)
    return _leading(client.presence(namespace, hashes)) * block_tokens if hashes else 0


def _leading(flags: Sequence[int]) -> int:
    """The number of leading blocks that are cached."""
    return next((position for position, flag in enumerate(flags) if not flag & _FOUND), len(flags))
