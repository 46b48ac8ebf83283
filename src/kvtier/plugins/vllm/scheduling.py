"""The scheduler's side: what the cache has of each prompt, held until it is loaded, and what to save of each step.

vLLM's scheduler calls everything, in one thread, and never waits: what asks the server runs on threads.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from kvtier.memory.lease import EmptyLease, Lease
from kvtier.observe.log_limit import LogLimit
from kvtier.plugins.vllm.identity import BLOCK_TOKENS, Identity, RequestSalts
from kvtier.plugins.vllm.plan import PIECE_BYTES, Load, Save, StepPlan, WorkerNews
from kvtier.plugins.vllm.settings import ConnectorSettings
from kvtier.plugins.vllm.statistics import CacheStats
from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.tiers.speeds import Speeds
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.load import DISK, Span
from kvtier.transfer.shared_stores import SharedStores

logger = logging.getLogger(__name__)

_NUM_THREADS = 4
_EXPLAINED_TOKENS = 64
_MAX_STEPS_IN_FLIGHT = 64
_HASHED_AT_ONCE = 128
_PAUSE_S = 1e-5
_RANDOM_END = re.compile(r"-[0-9a-f]{8}$")
_ASK_AGAIN_S = 0.005


@dataclass(frozen=True, slots=True)
class _Found:
    """A prompt's hashes, and what the cache has of them: blocks leased in memory, then blocks on disk."""

    root: Namespace
    hashes: list[BlockHash]
    lease: Lease
    seconds: float


@dataclass(slots=True)
class _Tracked:
    """A request as far as the cache is concerned. `hashes` are those of its full blocks so far.

    What was found lasts until it is loaded, or until the scheduler goes on without it.
    """

    request: Request
    asked_at: float = 0.0
    matching: Future[_Found | None] | None = None
    found: _Found | None = None
    root: Namespace | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    num_local_tokens: int = 0
    end: int = 0
    pages: list[int] = field(default_factory=list)
    num_saved: int = 0
    has_saves: bool = False
    is_loading: bool = False
    is_noted: bool = False
    may_load: bool = True
    is_over: bool = False
    limited_at: float | None = None


class SchedulerSide:
    """Owns the leases of everything that is promised to the scheduler."""

    def __init__(
        self, client: SingleClient, identity: Identity, settings: ConnectorSettings, chunk_tokens: int
    ) -> None:
        self._client = client
        self._identity = identity
        self._namespace = identity.fields.digest()
        self._page_tokens = identity.page_tokens
        self._unit_tokens = max(identity.page_tokens, BLOCK_TOKENS)
        self._settings = settings
        self._salts = RequestSalts()
        self._tracked: dict[str, _Tracked] = {}
        self._loading: set[str] = set()
        self._ending: set[str] = set()
        self._loads: list[Load] = []
        self._stats = CacheStats()
        self._log = LogLimit(logger)
        self._piece_blocks = max(1, PIECE_BYTES // identity.layout.slot_bytes)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kvtier-vllm-match")
        self._shared: SharedStores[Save] | None = None
        if identity.num_ranks > 1:
            self._shared = SharedStores(client, identity.num_ranks, self._threads)
        self._tiers = ("server", DISK) if client.is_local else ("tcp", "tcp")
        self._decision = LoadOrCompute(
            Speeds(), identity.layout, chunk_tokens, always_loads=settings.always_load, clock=time.monotonic
        )
        self._num_steps = 0
        self._steps: deque[tuple[int, float, list[tuple[int, int]]]] = deque(maxlen=_MAX_STEPS_IN_FLIGHT)
        self._stepped_at = 0.0

    def on_new_request(self, request: Request) -> None:
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return  # nothing that could be hashed
        tracked = _Tracked(request)
        self._tracked[request.request_id] = tracked
        self._begin_match(tracked)

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens beyond those computed can be loaded; None while that is being found out."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0
        tracked.num_local_tokens = num_computed_tokens
        if not tracked.may_load or num_computed_tokens % BLOCK_TOKENS:  # small pages: a load begins with a whole block
            return 0
        if tracked.matching is None and tracked.found is None:  # it was preempted: what was found is used up
            self._begin_match(tracked)
        if tracked.found is None and not self._take_found(tracked):
            if time.monotonic() - tracked.asked_at <= self._settings.match_timeout_s:
                return None
            self._stats.late_matches += 1
            tracked.may_load = False
            return 0
        if tracked.found is None:
            return 0  # it cannot be cached
        if tracked.found.lease.ended is MatchEnd.LIMIT and self._is_worth_waiting(tracked):
            return None
        return max(0, self._end_token(tracked) - num_computed_tokens)

    def note_allocated(self, request: Request, pages: Sequence[int], num_external_tokens: int) -> None:
        """The scheduler has pages for what was promised, or takes none of it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or (tracked.is_loading and not num_external_tokens):
            return
        self._explain(tracked, num_external_tokens)
        if not num_external_tokens:
            self._let_go(tracked)
            return
        last = self._end_token(tracked) // BLOCK_TOKENS
        first = last - num_external_tokens // BLOCK_TOKENS
        timeout_s = self._decision.timeout_s(first, last, request.num_tokens, self._settings.timeout_s)
        some_pages, first_block = self._pages_of(pages, first, last)
        hashes = [bytes(one) for one in tracked.hashes[first:last]]
        self._loads.append(Load(request.request_id, some_pages, first_block, hashes, timeout_s))
        tracked.is_loading = True
        self._loading.add(request.request_id)

    def hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """By where the blocks were when they were matched."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.found is None or not num_external_tokens:
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
            self._loading.discard(request_id)
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.is_loading = False
                self._let_go(tracked)

    def finish(self, request: Request) -> bool:
        """The request is over. Whether its pages are still being saved."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._forget(tracked)
        if tracked.is_loading:
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
        for tracked in self._tracked.values():
            self._forget(tracked)
        self._tracked.clear()
        self._threads.shutdown()
        if self._shared is not None:
            self._shared.close()
        self._client.close()

    # --- matching -----------------------------------------------------------------------------------------------------

    def _begin_match(self, tracked: _Tracked, to_release: Sequence[Lease] = ()) -> None:
        request = tracked.request
        asks = self._decision.is_match_worth_it(0, request.num_tokens // BLOCK_TOKENS)
        tracked.asked_at = time.monotonic()
        tracked.matching = self._threads.submit(self._match, tracked, request.all_token_ids[:], asks, to_release)

    def _match(self, tracked: _Tracked, tokens: list[int], asks: bool, to_release: Sequence[Lease]) -> _Found | None:
        """On a thread. None when the request cannot be told from others, and so cannot be cached."""
        for lease in to_release:
            lease.release()
        if tracked.is_over:
            return None  # given up while others were matched: those that come after it need not wait for it
        request = tracked.request
        try:
            root = salted_root(self._namespace, self._salts.of(request))
            hashes = _hashed_gently(root, tokens)
        except Exception as error:
            self._log.warning("identity", "a request is computed and not cached: %s", error)
            return None
        usable = (len(tokens) - 1) // BLOCK_TOKENS
        started_at = time.monotonic()
        if asks:
            lease = self._client.match_lazily(hashes[:usable], timeout_s=self._settings.timeout_s)
        else:
            lease = EmptyLease(MatchEnd.SLOWER)
        return _Found(root, hashes, lease, time.monotonic() - started_at)

    def _take_found(self, tracked: _Tracked) -> bool:
        """What its match has found, if it is over."""
        if tracked.matching is None or not tracked.matching.done():
            return False
        found, tracked.matching = tracked.matching.result(), None
        if found is None:
            del self._tracked[tracked.request.request_id]
            return True
        tracked.found, tracked.root, tracked.hashes = found, found.root, found.hashes
        in_memory = found.lease.num_blocks
        on_disk = found.lease.num_stored
        tracked.num_saved = in_memory + on_disk
        if in_memory or on_disk or found.lease.ended is MatchEnd.NEVER_STORED:
            self._decision.note_match(found.seconds)
        first = tracked.num_local_tokens // BLOCK_TOKENS
        spans = [
            Span(tier, tier, start, end, None, 0)
            for tier, start, end in zip(self._tiers, (0, in_memory), (in_memory, in_memory + on_disk), strict=True)
            if start < end
        ]
        tracked.end = max(first, self._decision.end_of_load(spans, first, tracked.request.num_tokens))
        if tracked.end < in_memory + on_disk:
            self._stats.slower_loads += 1
        return True

    def _is_worth_waiting(self, tracked: _Tracked) -> bool:
        """This client holds as much as it may, and the request got less than there is. Asks again now and then.

        What loads hold comes back soon; when there are none, it is requests that wait who hold it.
        """
        now = time.monotonic()
        tracked.limited_at = tracked.limited_at or now
        if now - tracked.limited_at > self._settings.timeout_s:
            return False
        if now - tracked.asked_at > _ASK_AGAIN_S:
            if self._loading:
                self._let_go(tracked)
                self._begin_match(tracked)
            else:
                self._make_room(tracked)
        return True

    def _make_room(self, tracked: _Tracked) -> None:
        """Requests whose turn comes later give back what was found for them."""
        leases = []
        for other in self._tracked.values():
            if other.found is not None and not other.is_loading:
                leases.append(other.found.lease)
                other.found = None
        self._begin_match(tracked, leases)

    def _end_token(self, tracked: _Tracked) -> int:
        """Where the load ends: at a page, and before the last token, which vLLM computes."""
        return min(tracked.end * BLOCK_TOKENS, tracked.request.num_tokens - 1) // self._unit_tokens * self._unit_tokens

    def _in_memory(self, tracked: _Tracked, num_external_tokens: int) -> int:
        """How many of the tokens to be loaded were in the cache's memory."""
        assert tracked.found is not None
        first = self._end_token(tracked) - num_external_tokens
        return min(max(0, tracked.found.lease.num_blocks * BLOCK_TOKENS - first), num_external_tokens)

    def _let_go(self, tracked: _Tracked) -> None:
        """Release what was found, on a thread: it takes a call."""
        found, tracked.found = tracked.found, None
        if found is not None:
            self._threads.submit(found.lease.release)

    def _forget(self, tracked: _Tracked) -> None:
        """The request is over: what is still being found is of no use either."""
        self._let_go(tracked)
        tracked.is_over = True
        if tracked.matching is not None:
            tracked.matching.add_done_callback(_release_result)
            tracked.matching = None

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
        if tracked.root is None:
            self._take_late(tracked)
        if tracked.root is None:
            return  # later, or never
        request = tracked.request
        num_known = request.num_prompt_tokens if self._settings.store == "prompt" else request.num_tokens
        end = min(num_tokens, num_known) // BLOCK_TOKENS
        first = tracked.num_saved
        if end <= first:
            return
        if len(tracked.hashes) < end:
            parent = tracked.hashes[-1] if tracked.hashes else None
            tokens = request.all_token_ids[len(tracked.hashes) * BLOCK_TOKENS : end * BLOCK_TOKENS]
            tracked.hashes += block_hashes(tracked.root, tokens, BLOCK_TOKENS, parent=parent)
        pages, first_block = self._pages_of(tracked.pages, first, end)
        hashes = [bytes(one) for one in tracked.hashes[first:end]]
        saves.append(Save(request.request_id, pages, first_block, hashes))
        tracked.num_saved = end
        tracked.has_saves = True

    def _take_late(self, tracked: _Tracked) -> None:
        """A match that came too late to load from still says what need not be saved."""
        if self._take_found(tracked):
            self._let_go(tracked)

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
        found = tracked.found
        if found is None:
            self._note(self._explanation(tracked, {}, MatchEnd.TIER_DOWN, tracked.num_local_tokens))
            return
        in_memory = self._in_memory(tracked, num_external_tokens)
        counts = {"server": in_memory, "disk": num_external_tokens - in_memory}
        num_found = found.lease.num_blocks + found.lease.num_stored
        if tracked.end < num_found:
            reason, ended_at = MatchEnd.SLOWER, tracked.end * BLOCK_TOKENS
        else:
            reason, ended_at = found.lease.ended, num_found * BLOCK_TOKENS
        self._note(self._explanation(tracked, counts, reason, ended_at))

    def _explanation(
        self, tracked: _Tracked, counts: dict[str, int], reason: MatchEnd, ended_at_tokens: int
    ) -> Explanation:
        request = tracked.request
        is_salted = tracked.root is not None and tracked.root != self._namespace
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


def _hashed_gently(root: Namespace, tokens: Sequence[int]) -> list[BlockHash]:
    """The hashes of all full blocks. Lets the scheduler's thread have the GIL between some and the next."""
    hashes: list[BlockHash] = []
    for first in range(0, len(tokens), _HASHED_AT_ONCE * BLOCK_TOKENS):
        if hashes:
            time.sleep(_PAUSE_S)
        some = tokens[first : first + _HASHED_AT_ONCE * BLOCK_TOKENS]
        hashes += block_hashes(root, some, BLOCK_TOKENS, parent=hashes[-1] if hashes else None)
    return hashes


def _release_result(matching: Future[_Found | None]) -> None:
    found = None if matching.cancelled() else matching.result()
    if found is not None:
        found.lease.release()
