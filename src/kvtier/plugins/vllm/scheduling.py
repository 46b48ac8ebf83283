"""The scheduler's side: what vLLM's scheduler asks and tells, for lookups of its prompts and stores of its steps.

vLLM's scheduler calls everything, in one thread, and never waits: what asks the server runs on threads.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier.blocks.hashing import BlockHash, block_hashes, salted_root
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import SingleClient
from kvtier.errors import KvtierError
from kvtier.plugins.vllm.identity import BLOCK_TOKENS, Identity, RequestSalts
from kvtier.plugins.vllm.plan import PIECE_BYTES, Load, Save, StepPlan, WorkerNews
from kvtier.plugins.vllm.settings import ConnectorSettings
from kvtier.plugins.vllm.statistics import CacheStats
from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.tiers.remote import SingleServerTier
from kvtier.tiers.speeds import Speeds
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.lookup import Lookup, Lookups
from kvtier.transfer.shared_stores import SharedStores

logger = logging.getLogger(__name__)

_NUM_THREADS = 4
_EXPLAINED_TOKENS = 64
_MAX_STEPS_IN_FLIGHT = 64
_RANDOM_END = re.compile(r"-[0-9a-f]{8}$")


@dataclass(slots=True)
class _Tracked:
    """A request as far as the cache is concerned."""

    request: Request
    lookup: Lookup
    num_local_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    num_saved: int = 0
    has_saves: bool = False
    is_noted: bool = False
    may_load: bool = True


class SchedulerSide:
    """Of one engine."""

    def __init__(
        self, client: SingleClient, identity: Identity, settings: ConnectorSettings, chunk_tokens: int
    ) -> None:
        self._client = client
        self._identity = identity
        self._namespace = identity.fields.digest()
        self._page_tokens = identity.page_tokens
        self._unit_tokens = max(identity.page_tokens, BLOCK_TOKENS)
        self._settings = settings
        self._salts = RequestSalts(settings.identity)
        self._tracked: dict[str, _Tracked] = {}
        self._loading: dict[str, Lookup] = {}
        self._ending: set[str] = set()
        self._loads: list[Load] = []
        self._stats = CacheStats()
        self._piece_blocks = max(1, PIECE_BYTES // identity.layout.slot_bytes)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kvtier-vllm-match")
        self._shared: SharedStores[Save] | None = None
        if identity.num_ranks > 1:
            self._shared = SharedStores(client, identity.num_ranks, self._threads)
        self._decision = LoadOrCompute(
            Speeds(), identity.layout, chunk_tokens, always_loads=settings.always_load, clock=time.monotonic
        )
        tier = SingleServerTier(client, "server" if client.is_local else "tcp")
        self._lookups = Lookups(tier, self._decision, self._threads, timeout_s=settings.timeout_s)
        self._num_steps = 0
        self._steps: deque[tuple[int, float, list[tuple[int, int]]]] = deque(maxlen=_MAX_STEPS_IN_FLIGHT)
        self._stepped_at = 0.0

    def on_new_request(self, request: Request) -> None:
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return  # nothing that could be hashed
        lookup = Lookup(lambda: request.all_token_ids[:], lambda: self._root(request))
        self._tracked[request.request_id] = _Tracked(request, lookup)
        self._lookups.begin(lookup)

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens beyond those computed can be loaded; None while that is being found out."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0
        tracked.num_local_tokens = num_computed_tokens
        if not tracked.may_load or num_computed_tokens % BLOCK_TOKENS:  # small pages: a load begins with a whole block
            return 0
        lookup = tracked.lookup
        if lookup.is_used_up:  # it was preempted
            self._lookups.begin(lookup)
        if lookup.lease is None and not self._take_found(tracked):
            if time.monotonic() - lookup.asked_at <= self._settings.match_timeout_s:
                return None
            self._stats.late_matches += 1
            tracked.may_load = False
            return 0
        if not lookup.is_cachable:
            return 0
        if self._lookups.is_worth_waiting(lookup):
            return None
        return max(0, self._end_token(tracked) - num_computed_tokens)

    def note_allocated(self, request: Request, pages: Sequence[int], num_external_tokens: int) -> None:
        """The scheduler has pages for what was promised, or takes none of it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or (self._lookups.is_loading(tracked.lookup) and not num_external_tokens):
            return
        self._explain(tracked, num_external_tokens)
        if not num_external_tokens:
            self._lookups.release(tracked.lookup)
            return
        last = self._end_token(tracked) // BLOCK_TOKENS
        first = last - num_external_tokens // BLOCK_TOKENS
        timeout_s = self._decision.timeout_s(first, last, request.num_tokens, self._settings.timeout_s)
        some_pages, first_block = self._pages_of(pages, first, last)
        hashes = [bytes(one) for one in tracked.lookup.hashes[first:last]]
        self._loads.append(Load(request.request_id, some_pages, first_block, hashes, timeout_s))
        self._lookups.begin_load(tracked.lookup)
        self._loading[request.request_id] = tracked.lookup

    def hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """By where the blocks were when they were matched."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.lookup.lease is None or not num_external_tokens:
            return {}
        in_memory = self._in_memory(tracked, num_external_tokens)
        counts = {CacheHitSource.HOST: in_memory, CacheHitSource.DISK: num_external_tokens - in_memory}
        return {source: count for source, count in counts.items() if count}

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """What the workers do with this step."""
        self._num_steps += 1
        plan = StepPlan(self._num_steps, loads=self._loads, preempted=set(output.preempted_req_ids or ()))
        self._loads = []
        for request_id in plan.preempted:
            self._drop_saves(request_id)
        chunks = [
            *((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs),
            *zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True),
        ]
        self._take_pages(output)
        saves: list[Save] = []
        for request_id, num_computed in chunks:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._plan_save(saves, tracked, num_computed + output.num_scheduled_tokens[request_id])
        plan.ended = {one for one in self._ending if self._shared is None or not self._shared.is_waiting(one)}
        self._ending -= plan.ended
        if self._shared is None:
            plan.saves = saves
        else:
            plan.saves = [replace(save, slots=slots) for save, slots in self._shared.take_ready()]
            for save in saves:
                for part in save.parts(self._piece_blocks):
                    self._shared.begin(part.request_id, [BlockHash(one) for one in part.hashes], part)
        counts = [(num_computed, output.num_scheduled_tokens[request_id]) for request_id, num_computed in chunks]
        self._steps.append((self._num_steps, time.monotonic(), counts))
        return plan

    def note_transfers(self, output: KVConnectorOutput) -> None:
        """A step is over. What loads were promised from need not be held any longer."""
        news = output.kv_connector_worker_meta
        failed: set[str] = set()
        if isinstance(news, WorkerNews):
            self._note_step(news.step)
            for loaded in news.loaded:
                self._decision.note_load(loaded.tier, loaded.nbytes, loaded.seconds)
            if self._shared is not None:
                self._shared.note(news.written, news.unwritten)
            failed = news.failed_loads
        for request_id in failed:
            tracked = self._tracked.get(request_id)
            if tracked is not None:  # it would fail again: the rest is computed, and what the cache lacks saved anew
                tracked.may_load = False
                tracked.num_saved = 0
                self._note(self._explanation(tracked, {}, MatchEnd.LOST, tracked.num_local_tokens))
        for request_id in output.finished_recving or ():
            lookup = self._loading.pop(request_id, None)
            if lookup is not None:
                self._lookups.end_load(lookup)

    def finish(self, request: Request) -> bool:
        """The request is over. Whether its pages are still being saved."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._lookups.forget(tracked.lookup)
        if self._lookups.is_loading(tracked.lookup):
            return False  # vLLM keeps the pages until the load is over, and nothing of them is being saved
        if tracked.has_saves:
            self._ending.add(request.request_id)
        return tracked.has_saves

    def reset(self) -> bool:
        """Forget everything that is cached of this model, for all its engines. False when the server did not do it."""
        try:
            self._client.drop()
        except KvtierError as error:
            logger.warning("the cache is not reset: %s", error)
            return False
        return True

    def take_stats(self) -> CacheStats:
        stats, self._stats = self._stats, CacheStats()
        return stats

    def close(self) -> None:
        self._lookups.close()
        self._tracked.clear()
        self._threads.shutdown()
        if self._shared is not None:
            self._shared.close()
        self._client.close()

    # --- matching -----------------------------------------------------------------------------------------------------

    def _root(self, request: Request) -> Namespace:
        """On a thread. Raises when the request cannot be told from others."""
        return salted_root(self._namespace, self._salts.of(request))

    def _take_found(self, tracked: _Tracked) -> bool:
        """What the lookup has found, if it is over."""
        lookup, request = tracked.lookup, tracked.request
        if not self._lookups.take(lookup, tracked.num_local_tokens // BLOCK_TOKENS, request.num_tokens):
            return False
        if not lookup.is_cachable:
            del self._tracked[request.request_id]
            return True
        tracked.num_saved = lookup.num_found
        if lookup.end < lookup.num_found:
            self._stats.slower_loads += 1
        return True

    def _end_token(self, tracked: _Tracked) -> int:
        """Where the load ends: at a page, and before the last token, which vLLM computes."""
        return (
            min(tracked.lookup.end * BLOCK_TOKENS, tracked.request.num_tokens - 1)
            // self._unit_tokens
            * self._unit_tokens
        )

    def _in_memory(self, tracked: _Tracked, num_external_tokens: int) -> int:
        """How many of the tokens to be loaded were in the cache's memory."""
        assert tracked.lookup.lease is not None
        first = self._end_token(tracked) - num_external_tokens
        return min(max(0, tracked.lookup.lease.num_blocks * BLOCK_TOKENS - first), num_external_tokens)

    # --- saving -------------------------------------------------------------------------------------------------------

    def _take_pages(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            if tracked := self._tracked.get(new.req_id):
                tracked.pages = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if tracked := self._tracked.get(request_id):
                if request_id in cached.resumed_req_ids:
                    tracked.pages = []
                tracked.pages += pages[0] if pages is not None else []

    def _plan_save(self, saves: list[Save], tracked: _Tracked, num_tokens: int) -> None:
        """Full blocks of known tokens that are there once this step is done."""
        lookup = tracked.lookup
        if lookup.root is None and self._take_found(tracked):  # too late to load from: it says what need not be saved
            self._lookups.release(lookup)
        if lookup.root is None:
            return  # later, or never
        request = tracked.request
        num_known = request.num_prompt_tokens if self._settings.store == "prompt" else request.num_tokens
        end = min(num_tokens, num_known) // BLOCK_TOKENS
        first = tracked.num_saved
        if end <= first:
            return
        if len(lookup.hashes) < end:
            parent = lookup.hashes[-1] if lookup.hashes else None
            tokens = request.all_token_ids[len(lookup.hashes) * BLOCK_TOKENS : end * BLOCK_TOKENS]
            lookup.hashes += block_hashes(lookup.root, tokens, BLOCK_TOKENS, parent=parent)
        pages, first_block = self._pages_of(tracked.pages, first, end)
        hashes = [bytes(one) for one in lookup.hashes[first:end]]
        saves.append(Save(request.request_id, pages, first_block, hashes))
        tracked.num_saved = end
        tracked.has_saves = True

    def _pages_of(self, pages: Sequence[int], first: int, end: int) -> tuple[list[int], int]:
        """The pages that hold blocks `first..end`, and which block of theirs is the first."""
        start = first * BLOCK_TOKENS // self._page_tokens
        stop = -(-end * BLOCK_TOKENS // self._page_tokens)
        return list(pages[start:stop]), first - start * self._page_tokens // BLOCK_TOKENS

    def _drop_saves(self, request_id: str) -> None:
        """Its pages are given away."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        tracked.has_saves = False
        if self._shared is not None and self._shared.drop(request_id):
            tracked.num_saved = 0

    # --- measuring and explaining -------------------------------------------------------------------------------------

    def _note_step(self, number: int) -> None:
        """How long a step took that is over now."""
        now = time.monotonic()
        while self._steps and self._steps[0][0] <= number:
            of_step, began_at, chunks = self._steps.popleft()
            if of_step == number and any(count > 1 for _, count in chunks):
                self._decision.speeds.note_prefill(chunks, now - max(began_at, self._stepped_at))
        self._stepped_at = now

    def _explain(self, tracked: _Tracked, num_external_tokens: int) -> None:
        if tracked.is_noted:
            return
        tracked.is_noted = True
        lookup = tracked.lookup
        if lookup.lease is None:
            self._note(self._explanation(tracked, {}, MatchEnd.TIER_DOWN, tracked.num_local_tokens))
            return
        in_memory = self._in_memory(tracked, num_external_tokens)
        counts = {"server": in_memory, "disk": num_external_tokens - in_memory}
        if lookup.end < lookup.num_found:
            reason, ended_at = MatchEnd.SLOWER, lookup.end * BLOCK_TOKENS
        else:
            reason, ended_at = lookup.lease.ended, lookup.num_found * BLOCK_TOKENS
        self._note(self._explanation(tracked, counts, reason, ended_at))

    def _explanation(
        self, tracked: _Tracked, counts: dict[str, int], reason: MatchEnd, ended_at_tokens: int
    ) -> Explanation:
        request = tracked.request
        is_salted = tracked.lookup.root not in (None, self._namespace)
        num_first = 0 if is_salted else min(request.num_prompt_tokens, _EXPLAINED_TOKENS)
        return Explanation(
            request_id=request.request_id,
            model=self._identity.name,
            namespace=self._namespace.hex(),
            prompt_tokens=request.num_prompt_tokens,
            block_tokens=BLOCK_TOKENS,
            cached_tokens={"device": tracked.num_local_tokens, **counts},
            ended_at_tokens=min(max(ended_at_tokens, tracked.num_local_tokens), request.num_prompt_tokens),
            reason=reason,
            tier="server",
            detail="the request has a cache_salt, an adapter or other inputs of its own" if is_salted else "",
            first_tokens=tuple(request.all_token_ids[:num_first]),
        )

    def _note(self, explanation: Explanation) -> None:
        """By vLLM's id and by the one that its client knows."""
        for request_id in dict.fromkeys(_ids_known_to_clients(explanation.request_id)):
            self._client.note(msgspec.structs.replace(explanation, request_id=request_id))


def _ids_known_to_clients(request_id: str) -> Iterator[str]:
    """vLLM's own id, and what its callers see of it: it puts a random end behind theirs.

    Of several answers to one prompt (`0_...`) and several prompts of one call (`...-0`) the first stands for all.
    """
    yield request_id
    given = _RANDOM_END.sub("", request_id)
    yield given
    given = given.removeprefix("0_")
    yield given
    yield given.removesuffix("-0")
