"""Why a prompt misses, asked of a running cache server or a cluster; and what an engine noted, with a second look.

Asking has no side effects: no lease, no change in the order of eviction, no load from disk. Callable from any thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.namespace import Namespace, NamespaceFields, namespace_differences
from kvtier.client.client import CacheClient
from kvtier.client.known_namespace import KnownNamespace
from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.wire.messages import LISTED_CACHED, LISTED_CLUSTER, LISTED_MEMORY, match_end_of

_MAX_NAMED_FIELDS = 8
_FOUND = LISTED_CACHED | LISTED_CLUSTER


class Asked(Protocol):
    """What can be asked for any namespace: a client of a cache server, or a cluster. Raises `TierError`."""

    def known_namespaces(self) -> list[KnownNamespace]: ...

    def presence(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> list[int]:
        """LISTED_ flags (see `wire.messages`) of a prompt's blocks, from its first on."""
        ...


def explain(
    asked: Asked,
    fields: NamespaceFields,
    tokens: Sequence[int],
    *,
    request_id: str = "",
    model: str = "",
    tier: str = "server",
) -> Explanation:
    """How much of a prompt a server holds, in memory, on disk and in a cluster, and why not more.

    A client that is `asked` needs no layout and no namespace. Raises `TierError` when no server answers.
    """
    namespace = fields.digest()
    block_tokens = fields.layout.block_tokens
    flags = asked.presence(namespace, block_hashes(namespace, tokens, block_tokens))
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
        tier=tier,
        first_tokens=tuple(map(int, tokens[:block_tokens])),
    )
    return _with_other_namespaces(asked, explanation, tokens, fields.document())


def explain_request(client: CacheClient, request_id: str) -> Explanation | None:
    """An engine's note on a request; None if there is no such note, or it was pushed out.

    If the first block was never stored, it is looked up in other namespaces now. Raises `TierError` if no server
    answers, and `ConfigError` for a note that is no explanation.
    """
    text = client.noted(request_id)
    if text is None:
        return None
    return look_again(client, Explanation.from_json(text))


def look_again(asked: Asked, explanation: Explanation, fields: Mapping[str, object] | None = None) -> Explanation:
    """The same, unless the first block of a request was never stored: other namespaces are asked for it now.

    `fields` are those of the request's namespace, if the caller knows them.
    """
    if explanation.ended_at_tokens:
        return explanation
    return _with_other_namespaces(asked, explanation, explanation.first_tokens, fields)


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Another namespace, and how much of the same tokens it has. `differs_in` is None when fields are not known."""

    known: KnownNamespace
    cached_tokens: int
    differs_in: list[str] | None

    def __str__(self) -> str:
        if not self.cached_tokens:
            return f"nothing is cached with these settings; the nearest is {self._name}, {self._difference()}"
        return f"{self.cached_tokens} of these tokens are cached as {self._name}, {self._difference()}"

    @property
    def _name(self) -> str:
        return f"{self.known.name or 'unnamed'} ({self.known.digest[:12]})"

    def _difference(self) -> str:
        if not self.differs_in:
            return "whose fields are unknown"
        named = ", ".join(self.differs_in[:_MAX_NAMED_FIELDS])
        num_more = len(self.differs_in) - _MAX_NAMED_FIELDS
        return f"which differs in {named}" + (f" and {num_more} more fields" if num_more > 0 else "")


def _with_other_namespaces(
    asked: Asked, explanation: Explanation, tokens: Sequence[int], fields: Mapping[str, object] | None
) -> Explanation:
    """The same, unless the block that was never stored is cached in another namespace. `fields` are our own.

    If no one knows the namespace, the nearest known one is named.
    """
    if explanation.reason is not MatchEnd.NEVER_STORED or not tokens:
        return explanation
    known = asked.known_namespaces()
    own = next((each for each in known if each.digest == explanation.namespace), None)
    if fields is None:
        fields = None if own is None else own.fields
    others: list[_Elsewhere] = []
    for each in known:
        if each.digest != explanation.namespace:
            is_known = fields is not None and each.fields is not None
            differs_in = namespace_differences(fields or {}, each.fields or {}) if is_known else None
            num_tokens = _cached_tokens(asked, each.namespace, tokens, each.block_tokens)
            others.append(_Elsewhere(each, num_tokens, differs_in))
    nearest = min(others, key=lambda each: (-each.cached_tokens, _distance(each)), default=None)
    if nearest is not None and nearest.cached_tokens > explanation.ended_at_tokens:
        return msgspec.structs.replace(explanation, reason=MatchEnd.OTHER_NAMESPACE, detail=str(nearest))
    nearest = min((each for each in others if each.differs_in), key=_distance, default=None)
    if nearest is not None and own is None and not explanation.ended_at_tokens and not explanation.detail:
        detail = str(dataclasses.replace(nearest, cached_tokens=0))
        return msgspec.structs.replace(explanation, detail=detail)
    return explanation


def _distance(other: _Elsewhere) -> tuple[bool, int]:
    return other.differs_in is None, len(other.differs_in or ())


def _cached_tokens(asked: Asked, namespace: Namespace, tokens: Sequence[int], block_tokens: int) -> int:
    """Few namespaces have its first block: the rest is hashed for those alone."""
    first = block_hashes(namespace, tokens[:block_tokens], block_tokens)
    if not first or not _leading(asked.presence(namespace, first)):
        return 0
    return _leading(asked.presence(namespace, block_hashes(namespace, tokens, block_tokens))) * block_tokens


def _leading(flags: Sequence[int]) -> int:
    """The number of leading blocks that are cached."""
    return next((position for position, flag in enumerate(flags) if not flag & _FOUND), len(flags))
