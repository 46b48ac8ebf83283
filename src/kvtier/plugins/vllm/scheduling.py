"""The scheduler's side: looks up prompts in the cache, and plans the loads and saves of each step.

vLLM's scheduler calls everything, in one thread. Calls to the server run on other threads, and are not waited for
while vLLM has other work. Tokens in vLLM's own cache are not looked up.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier.blocks.hashing import BlockHash, block_hashes, salted_root
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.errors import KvtierError
from kvtier.memory.lease import DISK
from kvtier.plugins.vllm.compat import HIT_SOURCES, CacheHitSource
from kvtier.plugins.vllm.events import ServerEvents
from kvtier.plugins.vllm.explaining import Explainer
from kvtier.plugins.vllm.identity import Identity, RequestSalts
from kvtier.plugins.vllm.own_cache import OwnCache
from kvtier.plugins.vllm.plan import PIECE_BYTES, PageLoad, Save, StepPlan, WorkerNews
from kvtier.plugins.vllm.settings import ConnectorSettings
from kvtier.plugins.vllm.statistics import CacheStats
from kvtier.plugins.vllm.step_times import StepTimes
from kvtier.plugins.vllm.tracked import Tracked, Wanted
from kvtier.tiers.remote import RemoteTier
from kvtier.tiers.speeds import Speeds
from kvtier.tiers.tier import Tier
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.hit_places import tokens_by_tier
from kvtier.transfer.known_prefixes import KnownPrefixes
from kvtier.transfer.leased_blocks import LeasedBlocks
from kvtier.transfer.lookup import Described, Lookup, Lookups, Search, hashed_gently
from kvtier.transfer.quick_turns import QUICK_TURNS
from kvtier.transfer.shared_stores import SharedStores

logger = logging.getLogger(__name__)

_NUM_THREADS = 4
_IDLE_WAIT_S = 0.01
"""Longest total wait for answers of a step without work. Without it, vLLM's polling keeps the GIL from the threads
that fetch them."""
_PREPARED_S = 0.025
"""vLLM's host schedules and prepares the prefill of a page behind 30,000 tokens in this time on an H200's host."""
_UNKNOWN_BYTES_PER_S = 50e9
"""The speed of an engine's first load, until it is measured."""


@dataclass(slots=True)
class _Loading:
    """A load: its blocks stay leased until all ranks have finished it."""

    lookup: Lookup
    num_ranks_left: int


class SchedulerSide:
    """The scheduler's side of an engine with one group of full attention."""

    def __init__(
        self,
        client: CacheClient,
        identity: Identity,
        settings: ConnectorSettings,
        chunk_tokens: int,
        hash_algorithm: str,
        events: ServerEvents | None = None,
    ) -> None:
        """vLLM hashes prompts by `hash_algorithm`, and computes at most `chunk_tokens` in a step."""
        self._client = client
        self._events = events
        self._namespace = identity.fields.digest()
        self._block_tokens = identity.layout.block_tokens
        self._block_bytes = identity.layout.block_bytes
        self._page_tokens = identity.page_tokens
        self._unit_tokens = identity.unit_tokens
        self._settings = settings
        self._salts = RequestSalts(settings.identity)
        self._is_one_full = identity.block_groups.is_one_full
        self._own = OwnCache(identity.page_tokens, is_one_full=self._is_one_full)
        self._known = KnownPrefixes(identity.page_tokens, self._block_tokens, hash_algorithm)
        self._num_returns = client.num_returns
        self._tracked: dict[str, Tracked] = {}
        self._num_ranks = identity.num_ranks
        self._load_numbers = itertools.count()
        self._loading: dict[int, _Loading] = {}
        self._waiting: set[str] = set()
        self._unused: dict[str, int] = {}
        """Loads that no step has used yet, by their requests: those that came whole, and that a step only reads."""
        self._running: set[str] = set()
        self._ending: set[str] = set()
        self._behind: set[str] = set()
        self._loads: list[PageLoad] = []
        self._idle_wait_s = _IDLE_WAIT_S
        self._stats = CacheStats()
        self._piece_blocks = max(1, PIECE_BYTES // identity.layout.slot_bytes)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kvtier-vllm-match")
        self._shared: SharedStores[Save] | None = None
        if identity.num_ranks > 1:
            self._shared = SharedStores(client, identity.num_ranks, self._threads)
        self._decision = LoadOrCompute(
            Speeds(), identity.layout, chunk_tokens, always_loads=settings.always_load, clock=time.monotonic
        )
        self._tier_name = "server" if client.is_local else "tcp"
        tier = RemoteTier(client, self._tier_name)
        search = self._search_in(tier, identity)
        self._lookups = Lookups(tier, self._decision, self._threads, timeout_s=settings.timeout_s, search=search)
        self._steps = StepTimes(self._decision.speeds)
        self._known_step = 0
        self._explainer = Explainer(client, identity)
        # vLLM reads and hashes requests on a thread, which would keep this one from the GIL for 5 ms at a time.
        QUICK_TURNS.begin()

    def bind(self, pool: BlockPool) -> None:
        """Note the pool of vLLM's own prefix cache."""
        self._own.bind(pool)

    def bind_manager(self, manager: KVCacheManager) -> None:
        """Note the manager that finds prefixes in vLLM's own cache."""
        self._own.bind_manager(manager)

    def on_new_request(self, request: Request) -> None:
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return  # embeddings cannot be hashed
        lookup = Lookup(
            functools.partial(self._describe, request), num_computed_last=0 if self._loads_whole(request) else 1
        )
        tracked = Tracked(request, lookup)
        self._tracked[request.request_id] = tracked
        num_own_tokens = self._own.num_tokens(request)
        if self._can_load_from(request, num_own_tokens):
            self._look(tracked, num_own_tokens)

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens after the computed ones can be loaded; None while that is not known."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0
        tracked.num_local_tokens = num_computed_tokens
        if not tracked.may_load or num_computed_tokens % self._block_tokens:  # small pages: a load begins with a block
            return 0
        lookup = tracked.lookup
        if not self._can_load_from(request, num_computed_tokens):
            self._lookups.cancel(lookup)
            return 0
        if self._lookups.is_loading(lookup):  # it was preempted before its last load was quite over
            return None
        if lookup.is_idle:  # vLLM had all of it when it came, or it was preempted
            self._look(tracked, num_computed_tokens)
        elif lookup.first * self._block_tokens > num_computed_tokens:  # vLLM has lost some of it since
            self._lookups.begin_again(lookup, request.num_tokens, num_computed_tokens // self._block_tokens)
        if lookup.lease is None and not self._take_found(tracked) and not self._take_while_idle(tracked):
            if time.monotonic() - lookup.asked_at <= self._settings.match_timeout_s:
                return None
            self._stats.late_matches += 1
            tracked.may_load = False
            return 0
        if not lookup.is_cachable:
            return 0
        if self._lookups.is_worth_waiting(lookup):
            return None
        tracked.computes_last_page = self._hides_a_step(lookup)
        return max(0, self._end_token(tracked) - num_computed_tokens)

    def note_allocated(self, request: Request, tables: Sequence[list[int]], num_external_tokens: int) -> None:
        """The scheduler has allocated pages for these tokens, in the tables of its groups; for 0 tokens, none."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or (self._lookups.is_loading(tracked.lookup) and not num_external_tokens):
            return
        lookup = tracked.lookup
        self._explain(tracked, num_external_tokens)
        if not num_external_tokens:
            self._lookups.release(lookup)
            return
        last = self._end_token(tracked) // self._block_tokens
        first = last - num_external_tokens // self._block_tokens
        timeout_s = self._decision.timeout_s(first, last, request.num_tokens, self._settings.timeout_s)
        number = next(self._load_numbers)
        wanted = self._wanted(tracked, tables, first, last)
        leased = self._leased(lookup, wanted, first, last)
        self._loads.append(
            PageLoad(
                number=number,
                request_id=request.request_id,
                pages=wanted.pages,
                first_block=wanted.first_block,
                hashes=wanted.hashes,
                timeout_s=timeout_s,
                leased=leased,
                num_tokens=num_external_tokens,
                stored_in=DISK if lookup.lease is None else lookup.lease.stored_in,
            )
        )
        if self._end_token(tracked) < request.num_tokens:  # else the step computes the last token anew
            self._unused[request.request_id] = number
        self._lookups.begin_load(lookup)
        self._loading[number] = _Loading(lookup, self._num_ranks)
        self._waiting.add(request.request_id)

    def hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Tokens by the tier in which their blocks were matched."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.lookup.lease is None or not num_external_tokens:
            return {}
        in_memory = self._in_memory(tracked, num_external_tokens)
        counts = tokens_by_tier(in_memory, num_external_tokens, tracked.lookup.lease.stored_in)
        return {HIT_SOURCES[tier]: count for tier, count in counts.items() if count}

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """What the workers load and save in this step."""
        self._steps.number += 1
        preempted = set(output.preempted_req_ids or ())
        plan = StepPlan(self._steps.number, self._known_step, loads=self._loads, preempted=preempted)
        self._loads = []
        for request_id in plan.preempted:
            self._drop_saves(request_id)
        self._running = set(output.num_scheduled_tokens)
        self._idle_wait_s = _IDLE_WAIT_S
        plan.is_idle = not self._running
        plan.first_used = self._take_used(output)
        self._take_pages(output)
        self._behind |= output.scheduled_cached_reqs.resumed_req_ids
        saves: list[Save] = []
        for request_id, num_tokens in self._due(output):
            tracked = self._tracked.get(request_id)
            if tracked is None or self._plan_save(saves, tracked, num_tokens):
                self._behind.discard(request_id)
            else:
                self._behind.add(request_id)
        plan.ended = {one for one in self._ending if self._shared is None or not self._shared.is_waiting(one)}
        self._ending -= plan.ended
        if self._shared is None:
            plan.saves = saves
        else:
            plan.saves = [replace(save, slots=slots) for save, slots in self._shared.take_ready()]
            for save in saves:
                for part in save.parts(self._piece_blocks):
                    self._shared.begin(part.request_id, part.hashes, part)
        self._steps.note_planned(output)
        return plan

    def note_transfers(self, output: KVConnectorOutput) -> None:
        """Take the workers' results after a step."""
        news = output.kv_connector_worker_meta
        failed: set[str] = set()
        if isinstance(news, WorkerNews):
            self._steps.note_done(news.step)
            self._known_step = max(self._known_step, news.step)
            for loaded in news.loaded:
                self._decision.note_load(loaded.tier, loaded.nbytes, loaded.seconds)
            if self._shared is not None:
                self._shared.note(news.written, news.unwritten)
            failed = news.failed_loads
            for number, count in news.ended_loads.items():
                self._note_ended(number, count)
            self._note_saved(news.saved)
        self._waiting -= output.finished_recving or set()
        for request_id in failed:
            self._unused.pop(request_id, None)
            tracked = self._tracked.get(request_id)
            if tracked is not None:  # another load would fail too: compute the rest, and save what the cache lacks
                tracked.may_load = False
                self._save_again(tracked)
                local = tracked.num_local_tokens
                tracked.explanation = self._explainer.explain(
                    tracked.request, tracked.lookup.root, local, {}, MatchEnd.LOST, local
                )

    def _take_used(self, output: SchedulerOutput) -> set[int]:
        """The loads that this step is the first to use. Without the request of a load, its pages may be another's."""
        used = [request_id for request_id in self._unused if request_id in output.num_scheduled_tokens]
        return {self._unused.pop(request_id) for request_id in used}

    def _note_ended(self, number: int, num_ranks: int) -> None:
        """`num_ranks` more ranks have finished a load: its lease is released after the last."""
        loading = self._loading[number]
        loading.num_ranks_left -= num_ranks
        if loading.num_ranks_left <= 0:
            self._lookups.end_load(loading.lookup)
            del self._loading[number]

    def _note_saved(self, numbers: Set[int]) -> None:
        """These saves are finished."""

    def finish(self, request: Request) -> bool:
        """Forget a finished request. True if its pages are still being saved."""
        tracked = self._tracked.pop(request.request_id, None)
        self._running.discard(request.request_id)
        self._behind.discard(request.request_id)
        self._unused.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.explanation is not None:
            self._explainer.note(tracked.explanation)
        self._lookups.forget(tracked.lookup)
        if request.request_id in self._waiting:
            return False  # vLLM keeps the pages until the load ends, and none is being saved
        if tracked.has_saves:
            self._ending.add(request.request_id)
        return tracked.has_saves

    def reset(self) -> bool:
        """Drop all cached blocks of this model, for all of its engines. False if the server did not."""
        self._known.forget_stored()
        try:
            self._client.drop()
        except KvtierError as error:
            logger.warning("cannot reset the cache: %s", error)
            return False
        return True

    def take_stats(self) -> CacheStats:
        stats, self._stats = self._stats, CacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """Events for routers. After a reset of its cache vLLM reports everything as cleared, so all is sent again."""
        if self._events is None:
            return []
        if self._own.take_reset():
            self._events.start_over()
        return self._events.take()

    def close(self) -> None:
        QUICK_TURNS.end()
        if self._events is not None:
            self._events.close()
        self._lookups.close()
        self._tracked.clear()
        self._threads.shutdown()
        if self._shared is not None:
            self._shared.close()
        self._client.close()

    # --- matching -----------------------------------------------------------------------------------------------------

    def _describe(self, request: Request) -> Described:
        """The request's root and hashes; runs on a thread. Raises if its inputs cannot be identified."""
        root = salted_root(self._namespace, self._salts.of(request))
        pages = self._own.hashes_of(request)

        def hash_rest(first: int, parent: BlockHash | None) -> list[BlockHash]:
            return hashed_gently(root, request.all_token_ids[first * self._block_tokens :], self._block_tokens, parent)

        return self._known.describe(root, pages, hash_rest)

    def _quick_root(self, request: Request) -> Namespace | None:
        """The root of the request's hashes; None if that needs files to be read (adapters)."""
        if request.lora_request is not None:
            return None
        return salted_root(self._namespace, self._salts.of(request))

    def _loads_whole(self, request: Request) -> bool:
        """Whether the last token may be loaded: vLLM then computes that token alone, as a decode."""
        return self._settings.whole_prompts and request.pooling_params is None  # pooling needs every token's output

    def _hides_a_step(self, lookup: Lookup) -> bool:
        """The load of the only prompt takes so long that vLLM prepares a prefill meanwhile.

        On the device such a step begins with the first layers that arrive, and a decode only behind the whole load.
        """
        if len(self._tracked) > 1 or lookup.lease is None:
            return False
        nbytes = lookup.lease.num_blocks * self._block_bytes
        load_s = self._decision.speeds.load_s(self._tier_name, nbytes)
        return (nbytes / _UNKNOWN_BYTES_PER_S if load_s is None else load_s) >= _PREPARED_S

    def _can_load_from(self, request: Request, num_tokens: int) -> bool:
        """Whether a load could extend this many tokens.

        It is not worth a load that vLLM's own cache never has the last page of a prompt.
        """
        return (request.num_tokens - 1) // self._unit_tokens * self._unit_tokens > num_tokens

    def _look(self, tracked: Tracked, num_own_tokens: int) -> None:
        """Look up what vLLM lacks; occasionally everything, so that the server keeps blocks that vLLM has, too."""
        request = tracked.request
        is_known = self._known_prefix(request, num_own_tokens) is not None
        self._lookups.begin(tracked.lookup, request.num_tokens, num_own_tokens // self._block_tokens if is_known else 0)

    def _known_prefix(self, request: Request, num_own_tokens: int) -> Described | None:
        """The prefix that vLLM has, if the server recently had nearly all of it."""
        if self._num_returns != self._client.num_returns:  # the server may have been replaced
            self._num_returns = self._client.num_returns
            self._known.forget_stored()
        pages = self._own.hashes_of(request, num_own_tokens)
        root = self._quick_root(request) if pages else None
        return None if root is None else self._known.fresh(root, pages)

    def _take_while_idle(self, tracked: Tracked) -> bool:
        """If nothing runs or loads, wait a moment for the answer."""
        if self._running or self._loading or self._idle_wait_s <= 0:
            return False
        started_at = time.monotonic()
        self._lookups.wait(tracked.lookup, self._idle_wait_s)
        self._idle_wait_s -= time.monotonic() - started_at
        return self._take_found(tracked)

    def _take_found(self, tracked: Tracked) -> bool:
        """Take the lookup's result; False while it is running."""
        lookup, request = tracked.lookup, tracked.request
        if not self._lookups.take(lookup, tracked.num_local_tokens // self._block_tokens):
            return False
        if not lookup.is_cachable:
            del self._tracked[request.request_id]
            return True
        tracked.num_saved = lookup.stored_end
        self._note_for_events(tracked, lookup.first, lookup.stored_end)
        self._note_stored(tracked, is_asked=not lookup.first and not _is_away(lookup))
        if lookup.end < lookup.found_end:
            self._stats.slower_loads += 1
        return True

    def _note_stored(self, tracked: Tracked, *, is_asked: bool) -> None:
        root = tracked.lookup.root
        assert root is not None
        pages = self._own.hashes_of(tracked.request)
        self._known.note_stored(root, pages, tracked.num_saved, is_asked=is_asked)

    def _note_for_events(self, tracked: Tracked, first: int, end: int) -> None:
        """Report blocks that the server has, or is about to get."""
        if self._events is not None and first < end:
            pages = self._own.hashes_of(tracked.request)
            self._events.note(tracked.request, pages, tracked.lookup.hashes, first, end)

    def _end_token(self, tracked: Tracked) -> int:
        """The end of the load, at a page boundary."""
        lookup = tracked.lookup
        num_computed_last = 1 if tracked.computes_last_page else lookup.num_computed_last
        end = min(lookup.end * self._block_tokens, tracked.request.num_tokens - num_computed_last)
        return end // self._unit_tokens * self._unit_tokens

    def _in_memory(self, tracked: Tracked, num_external_tokens: int) -> int:
        """How many of the tokens to load were in the server's memory."""
        lookup = tracked.lookup
        assert lookup.lease is not None
        first = self._end_token(tracked) - num_external_tokens
        end = (lookup.first + lookup.lease.num_blocks) * self._block_tokens
        return min(max(0, end - first), num_external_tokens)

    # --- saving -------------------------------------------------------------------------------------------------------

    def _take_pages(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            if tracked := self._tracked.get(new.req_id):
                tracked.pages = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids:
            if tracked := self._tracked.get(request_id):
                tracked.pages = []
        for request_id, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if pages is not None and (tracked := self._tracked.get(request_id)):
                tracked.pages += pages[0]

    def _due(self, output: SchedulerOutput) -> list[tuple[str, int]]:
        """Requests of which this step may complete blocks to save, and their numbers of tokens after it.

        These are new and resumed ones, those that reach the end of a block, and those that are behind: what they have
        to save was not known in earlier steps. Most decodes are none of these.
        """
        counts, size, behind = output.num_scheduled_tokens, self._block_tokens, self._behind
        cached = output.scheduled_cached_reqs
        due = [(new.req_id, new.num_computed_tokens + counts[new.req_id]) for new in output.scheduled_new_reqs]
        due += [
            (request_id, num_computed + counts[request_id])
            for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if num_computed % size + counts[request_id] >= size or request_id in behind
        ]
        return due

    def _save_again(self, tracked: Tracked) -> None:
        """Any of the request's blocks may be missing from the cache: save it from its first block on."""
        tracked.num_saved = 0
        self._behind.add(tracked.request.request_id)
        if tracked.lookup.root is not None:
            self._note_stored(tracked, is_asked=False)

    def _plan_save(self, saves: list[Save], tracked: Tracked, num_tokens: int) -> bool:
        """Save the blocks that are full at the end of this step. False if later steps have to save some of them."""
        if not self._knows_what_is_stored(tracked):
            return not tracked.lookup.is_cachable
        lookup, request = tracked.lookup, tracked.request
        saves_answers = self._settings.store != "prompt"
        num_known = request.num_tokens if saves_answers else request.num_prompt_tokens
        end = min(num_tokens, num_known) // self._block_tokens
        is_all_known = not saves_answers or num_tokens // self._block_tokens <= end
        if self._is_one_full and (most := self._client.most_prompt_blocks) is not None:
            end = min(end, most)
        first = tracked.num_saved
        if end <= first:
            return is_all_known
        if len(lookup.hashes) < end:
            assert lookup.root is not None
            parent = lookup.hashes[-1] if lookup.hashes else None
            tokens = request.all_token_ids[len(lookup.hashes) * self._block_tokens : end * self._block_tokens]
            lookup.hashes += block_hashes(lookup.root, tokens, self._block_tokens, parent=parent)
        save = self._save_of(tracked, first, end)
        if save is None:
            return False
        if save.hashes:
            saves.append(save)
            tracked.has_saves = True
            self._note_for_events(tracked, first, end)
        tracked.num_saved = end
        if end * self._block_tokens <= request.num_prompt_tokens:
            self._note_stored(tracked, is_asked=False)
        return is_all_known

    def _knows_what_is_stored(self, tracked: Tracked) -> bool:
        """Whether the stored prefix is known, from this request's lookup or from others; if not, start a lookup."""
        lookup, request = tracked.lookup, tracked.request
        if lookup.root is not None:
            return True
        if lookup.matching is None:
            known = self._known_prefix(request, tracked.num_local_tokens)
            if known is None:
                self._lookups.begin(lookup, request.num_tokens)
                return False
            lookup.root, lookup.hashes = known.root, known.hashes
            num_stored = self._known.num_stored(known.root, self._own.hashes_of(request))
            tracked.num_saved = max(num_stored, tracked.num_local_tokens // self._block_tokens)
            return True
        if not self._take_found(tracked):
            return False
        self._lookups.release(lookup)  # too late to load, but it shows what is already stored
        return lookup.root is not None

    def _search_in(self, tier: Tier, identity: Identity) -> Search | None:
        """The search for prompts; None for block by block."""
        return None

    def _wanted(self, tracked: Tracked, tables: Sequence[list[int]], first: int, end: int) -> Wanted:
        """Blocks `first..end` and their pages."""
        start = first * self._block_tokens // self._page_tokens
        stop = -(-end * self._block_tokens // self._page_tokens)
        first_block = first - start * self._page_tokens // self._block_tokens
        return Wanted(list(tables[0][start:stop]), first_block, tracked.lookup.hashes[first:end])

    def _leased(self, lookup: Lookup, wanted: Wanted, first: int, end: int) -> LeasedBlocks | None:
        """Places of these blocks in the server's memory, if all are in it."""
        return lookup.leased(first, end)

    def _save_of(self, tracked: Tracked, first: int, end: int) -> Save | None:
        """The save of blocks `first..end`; None if it is not possible now."""
        wanted = self._wanted(tracked, (tracked.pages,), first, end)
        return Save(tracked.request.request_id, wanted.pages, wanted.first_block, wanted.hashes)

    def _drop_saves(self, request_id: str) -> None:
        """Drop the saves of a request that loses its pages."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        had_saves, tracked.has_saves = tracked.has_saves, False
        if had_saves if self._shared is None else self._shared.drop(request_id):
            self._save_again(tracked)

    # --- explaining ---------------------------------------------------------------------------------------------------

    def _explain(self, tracked: Tracked, num_external_tokens: int) -> None:
        if tracked.explanation is not None:
            return
        lookup, local = tracked.lookup, tracked.num_local_tokens
        counts: dict[str, int] = {}
        if lookup.lease is None:
            has_all = not self._can_load_from(tracked.request, local)
            reason, ended_at = (MatchEnd.ALL if has_all else MatchEnd.TIER_DOWN), local
        else:
            in_memory = self._in_memory(tracked, num_external_tokens)
            counts = tokens_by_tier(in_memory, num_external_tokens, lookup.lease.stored_in)
            reason, ended_at = lookup.ended, lookup.found_end * self._block_tokens
            if lookup.end < lookup.found_end:
                reason, ended_at = MatchEnd.SLOWER, lookup.end * self._block_tokens
        tracked.explanation = self._explainer.explain(tracked.request, lookup.root, local, counts, reason, ended_at)


def _is_away(lookup: Lookup) -> bool:
    """The lookup did not see everything that the cache has."""
    return lookup.lease is None or lookup.ended in (MatchEnd.TIER_DOWN, MatchEnd.SLOWER, MatchEnd.LIMIT)
