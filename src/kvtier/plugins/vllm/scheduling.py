"""The scheduler's side: what the cache has of each prompt, held until it is loaded, and what to save of each step.

vLLM's scheduler calls everything, in one thread, and never waits: matches run on threads of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier.blocks.hashing import BlockHash, block_hashes, salted_root
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.memory.lease import BlockLease, Lease
from kvtier.plugins.vllm.identity import BLOCK_TOKENS, Identity, salt_of
from kvtier.plugins.vllm.plan import Move, StepPlan
from kvtier.plugins.vllm.settings import ConnectorSettings

logger = logging.getLogger(__name__)

_NUM_MATCHERS = 4


@dataclass(frozen=True, slots=True)
class _Found:
    """The hashes of a prompt's blocks, and what is cached of them."""

    hashes: list[BlockHash]
    lease: Lease


@dataclass(slots=True)
class _Tracked:
    """A request as far as the cache is concerned. `hashes` are those of its full blocks so far."""

    request: Request
    root: Namespace
    asked_at: float = 0.0
    matching: Future[_Found] | None = None
    lease: Lease | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_saved: int = 0
    has_saves: bool = False
    is_loading: bool = False
    may_load: bool = True


class SchedulerSide:
    """Owns the leases of everything that is promised to the scheduler."""

    def __init__(self, client: CacheClient, identity: Identity, settings: ConnectorSettings) -> None:
        self._client = client
        self._namespace = identity.fields.digest()
        self._page_tokens = max(identity.page_tokens, BLOCK_TOKENS)
        self._settings = settings
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Move] = []
        self._matchers = ThreadPoolExecutor(_NUM_MATCHERS, "kvtier-vllm-match")

    def on_new_request(self, request: Request) -> None:
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return  # nothing that could be hashed
        tracked = _Tracked(request, salted_root(self._namespace, salt_of(request)))
        self._tracked[request.request_id] = tracked
        self._begin_match(tracked)

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens beyond those computed can be loaded; None while that is being found out."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.may_load:
            return 0
        if tracked.matching is None and tracked.lease is None:  # it was preempted: what was found is used up
            self._begin_match(tracked)
        if tracked.matching is not None:
            if not tracked.matching.done():
                is_late = time.monotonic() - tracked.asked_at > self._settings.match_timeout_s
                return 0 if is_late else None
            found, tracked.matching = tracked.matching.result(), None
            tracked.lease, tracked.hashes = found.lease, found.hashes
            tracked.num_saved = tracked.lease.num_blocks
        assert tracked.lease is not None
        num_tokens = tracked.lease.num_blocks * BLOCK_TOKENS
        num_tokens = min(num_tokens, request.num_tokens - 1) // self._page_tokens * self._page_tokens
        return max(0, num_tokens - num_computed_tokens)

    def note_allocated(self, request: Request, pages: Sequence[int], num_external_tokens: int) -> None:
        """The scheduler has pages for what was promised, or takes none of it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if not num_external_tokens:
            if not tracked.is_loading:
                self._let_go(tracked)
            return
        assert tracked.lease is not None
        end = min(tracked.lease.num_blocks * BLOCK_TOKENS, request.num_tokens - 1) // self._page_tokens
        last = end * self._page_tokens // BLOCK_TOKENS
        first = last - num_external_tokens // BLOCK_TOKENS
        hashes = [bytes(one) for one in tracked.hashes[first:last]]
        self._loads.append(Move(request.request_id, list(pages), first * BLOCK_TOKENS, hashes))
        tracked.is_loading = True

    def hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """By where the blocks were when they were matched."""
        tracked = self._tracked.get(request.request_id)
        lease = None if tracked is None else tracked.lease
        if not num_external_tokens or not isinstance(lease, BlockLease):
            return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}
        beyond = lease.num_blocks * BLOCK_TOKENS - num_external_tokens
        in_memory = min(max(0, lease.num_ready_at_match * BLOCK_TOKENS - beyond), num_external_tokens)
        found = {CacheHitSource.HOST: in_memory, CacheHitSource.DISK: num_external_tokens - in_memory}
        return {source: count for source, count in found.items() if count}

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """What the workers do with this step."""
        plan = StepPlan(loads=self._loads, preempted=set(output.preempted_req_ids or ()))
        self._loads = []
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.pages = list(new.block_ids[0])
                self._plan_save(plan, tracked, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for request_id, pages, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if request_id in cached.resumed_req_ids:
                tracked.pages = []
            tracked.pages += pages[0] if pages is not None else []
            self._plan_save(plan, tracked, num_computed + output.num_scheduled_tokens[request_id])
        return plan

    def note_transfers(self, output: KVConnectorOutput) -> None:
        """Loads are over: what they were promised from need not be held any longer."""
        for request_id in output.finished_recving or ():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.is_loading = False
                self._let_go(tracked)
                if request_id in (output.failed_recving or ()):
                    # It would fail again: all of it is computed now, and what the cache lacks of it is saved anew.
                    tracked.may_load = False
                    tracked.num_saved = 0

    def finish(self, request: Request) -> bool:
        """The request is over. Whether its pages are still being saved."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._let_go(tracked)
        return tracked.has_saves

    def close(self) -> None:
        for tracked in self._tracked.values():
            self._let_go(tracked)
        self._tracked.clear()
        self._matchers.shutdown()
        self._client.close()

    # --- private ------------------------------------------------------------------------------------------------------

    def _begin_match(self, tracked: _Tracked) -> None:
        tracked.asked_at = time.monotonic()
        tracked.matching = self._matchers.submit(self._match, tracked.root, list(tracked.request.all_token_ids))

    def _match(self, root: Namespace, tokens: list[int]) -> _Found:
        """On a matcher's thread."""
        hashes = block_hashes(root, tokens, BLOCK_TOKENS)
        usable = (len(tokens) - 1) // BLOCK_TOKENS
        return _Found(hashes, self._client.match(hashes[:usable], timeout_s=self._settings.timeout_s))

    def _plan_save(self, plan: StepPlan, tracked: _Tracked, num_tokens: int) -> None:
        """Full blocks of known tokens that are there once this step is done."""
        request = tracked.request
        num_known = request.num_prompt_tokens if self._settings.store == "prompt" else request.num_tokens
        end = min(num_tokens, num_known) // BLOCK_TOKENS
        first = tracked.num_saved
        if end <= first:
            return
        if len(tracked.hashes) < end:
            parent = tracked.hashes[-1] if tracked.hashes else None
            tokens = list(request.all_token_ids[len(tracked.hashes) * BLOCK_TOKENS : end * BLOCK_TOKENS])
            tracked.hashes += block_hashes(tracked.root, tokens, BLOCK_TOKENS, parent=parent)
        hashes = [bytes(one) for one in tracked.hashes[first:end]]
        plan.saves.append(Move(request.request_id, list(tracked.pages), first * BLOCK_TOKENS, hashes))
        tracked.num_saved = end
        tracked.has_saves = True

    def _let_go(self, tracked: _Tracked) -> None:
        """Release what was found, or what is being found, on a thread: it may take a call."""
        lease, tracked.lease = tracked.lease, None
        matching, tracked.matching = tracked.matching, None
        if lease is not None:
            self._matchers.submit(lease.release)
        elif matching is not None:
            matching.add_done_callback(_release_result)


def _release_result(matching: Future[_Found]) -> None:
    if not matching.cancelled() and matching.exception() is None:
        matching.result().lease.release()
