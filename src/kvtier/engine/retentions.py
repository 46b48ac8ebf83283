"""Prompts that are to stay cached: an engine asks its tiers for that while it computes them. No torch.

A thread of its own asks, since a tier may be slow: neither the engine's thread nor those that make prompts wait for it.
The outcomes of recent requests are kept, within bounds.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvtier.blocks.hashing import BlockHash, block_hashes, salted_root
from kvtier.blocks.namespace import Namespace
from kvtier.observe.log_limit import LogLimit
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.retention import RetentionAsk, RetentionOutcome

logger = logging.getLogger(__name__)

_MAX_KNOWN = 4096
_MAX_WAITING = 256
NO_TIERS = "the model has no cache that keeps blocks longer than others"
_TOO_MANY = "too many prompts wait for theirs"
_FAILED = "the cache did not answer"

Tell = Callable[[list[RetentionOutcome]], None]


class EngineRetentions:
    """The retentions of one engine; without `hierarchy`, nothing is granted. `close` ends its thread."""

    def __init__(self, hierarchy: Hierarchy | None = None, namespace: Namespace | None = None, block_tokens: int = 1):
        self._hierarchy = hierarchy
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._lock = threading.Lock()
        self._known: OrderedDict[str, list[RetentionOutcome]] = OrderedDict()
        self._num_waiting = 0
        self._threads: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._log_limit = LogLimit(logger)

    def ask(
        self, request_id: str, tokens: Sequence[int], salt: str, asks: Sequence[tuple[RetentionAsk, int]], tell: Tell
    ) -> None:
        """Each ask is for a number of leading tokens. `tell` is called with the outcomes, from this or another thread.

        Never waits.
        """
        whole = [self._outcome(ask, num_tokens) for ask, num_tokens in asks]
        with self._lock:
            reason = ""
            if self._hierarchy is None or self._is_closed:
                reason = NO_TIERS
            elif self._num_waiting >= _MAX_WAITING:
                reason = _TOO_MANY
            else:
                self._num_waiting += 1
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(1, "kvtier-retain")
                self._threads.submit(self._ask, request_id, list(tokens), salt, list(asks), tell)
        if reason:
            self._report(request_id, [msgspec.structs.replace(one, reason=reason) for one in whole], tell)

    def noted(self, request_id: str) -> list[RetentionOutcome]:
        """The outcomes of a recent request; empty while unknown. Never waits."""
        return self._known.get(request_id, [])

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            threads = self._threads
        if threads is not None:
            threads.shutdown(cancel_futures=True)

    def _outcome(self, ask: RetentionAsk, num_tokens: int) -> RetentionOutcome:
        full = num_tokens - num_tokens % self._block_tokens
        return RetentionOutcome(asked_tokens=full, asked_ttl_s=ask.ttl_s, priority=ask.priority)

    def _ask(
        self, request_id: str, tokens: list[int], salt: str, asks: Sequence[tuple[RetentionAsk, int]], tell: Tell
    ) -> None:
        """Runs in the thread."""
        try:
            assert self._namespace is not None
            most = max(num_tokens for _, num_tokens in asks)
            hashes = block_hashes(salted_root(self._namespace, salt), tokens[:most], self._block_tokens)
            outcomes = [self._retain(hashes, ask, num_tokens) for ask, num_tokens in asks]
        except Exception as error:  # a request is answered even if this fails
            self._log_limit.warning("retain", "a prompt could not be retained: %s", str(error))
            outcomes = [
                msgspec.structs.replace(self._outcome(ask, num_tokens), reason=_FAILED) for ask, num_tokens in asks
            ]
        finally:
            with self._lock:
                self._num_waiting -= 1
        self._report(request_id, outcomes, tell)

    def _retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk, num_tokens: int) -> RetentionOutcome:
        assert self._hierarchy is not None
        wanted = hashes[: num_tokens // self._block_tokens]
        outcome = self._outcome(ask, num_tokens)
        if not wanted:
            return msgspec.structs.replace(outcome, reason="the prompt has no full block")
        tier, granted = self._hierarchy.retain(wanted, ask)
        return msgspec.structs.replace(
            outcome,
            granted_tokens=granted.num_blocks * self._block_tokens,
            granted_ttl_s=granted.ttl_s if granted.num_blocks else 0.0,
            tier=tier if granted.num_blocks else "",
            reason=granted.reason or ("" if granted.num_blocks else NO_TIERS),
        )

    def _report(self, request_id: str, outcomes: list[RetentionOutcome], tell: Tell) -> None:
        with self._lock:
            self._known[request_id] = outcomes
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        tell(outcomes)
