"""A worker's side: turns vLLM's calls into transfers between its pages and the cache server.

Pages that are being saved are not freed: the scheduler waits for the worker's report that a finished request is saved.
A preempted request loses its pages at once: copies under way are awaited, all others dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from kvtier.client.client import CacheClient
from kvtier.plugins.vllm.compat import KVConnectorTransferResults
from kvtier.plugins.vllm.identity import Identity
from kvtier.plugins.vllm.plan import PIECE_BYTES, PageLoad, Save, StepPlan, WorkerNews
from kvtier.plugins.vllm.statistics import CacheStats
from kvtier.tiers.remote import RemoteTier
from kvtier.tiers.staged import StagedTier
from kvtier.tiers.tier import Tier
from kvtier.transfer.copier import Copier, Copies
from kvtier.transfer.copiers.opaque_pages import OpaquePages
from kvtier.transfer.copiers.own_threads import made_apart
from kvtier.transfer.copiers.page_copier import opaque_copier, page_copier
from kvtier.transfer.hit_places import named_parts, place_of
from kvtier.transfer.load_news import EndedLoad, Loaded, LoadNews
from kvtier.transfer.places import places_of
from kvtier.transfer.shared_stores import ReservedRoom, ShareWriter
from kvtier.transfer.worker_transfer import WorkerTransfer

_STAGING_PIECES = 3
_MIN_STAGING_BLOCKS = 16
_IDLE_WAIT_S = 0.0005
"""Longest wait for a load in a step without work. Without it, vLLM's polling keeps the GIL from the load; prompts that
came meanwhile are looked up after it."""
_ARRIVING_S = 0.05
"""Longest wait of a computing step for the load that precedes it on the device; usually about 15 ms."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Copies of the load with this `number`, which was reported in step number `step`, before they were done."""

    number: int
    step: int
    copies: Copies


class WorkerSide:
    """The worker's side of one rank of an engine."""

    def __init__(self, client: CacheClient, identity: Identity, rank: int) -> None:
        self._client = client
        self._identity = identity
        self._rank = rank
        self._block_tokens = identity.layout.block_tokens
        self._transfer: WorkerTransfer | None = None
        self._loading: dict[str, PageLoad] = {}
        self._coming: set[str] = set()
        self._arriving: list[_Arriving] = []
        self._needed: list[Copies] = []
        """Copies that the current step uses, or whose pages it may."""
        self._layer_numbers = {name: number for number, name in enumerate(identity.layer_names)}
        self._last_layer = identity.layout.layers - 1
        self._unasked_layers = set(identity.layer_names)
        """Layers of which vLLM has not said yet that it is about to queue them."""
        self._waits_by_layer = False
        self._ended: set[str] = set()
        self._saving: dict[int, Save] = {}
        self._is_one_full = identity.block_groups.is_one_full
        self._failed: set[str] = set()
        self._bad_pages: set[int] = set()
        self._news = WorkerNews()
        self._stats = CacheStats()
        self._counted = (0, 0)
        self._plan = StepPlan()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start transfers to and from these tensors. Raises `ConfigError` if they do not match the engine's config."""
        self._transfer = made_apart(functools.partial(self._open, kv_caches))

    def _open(self, kv_caches: dict[str, torch.Tensor]) -> WorkerTransfer:
        identity, client = self._identity, self._client
        copier = self._new_copier([kv_caches[name] for name in identity.layer_names])
        assert identity.num_ranks > 1 or copier.is_whole, "a block must not be published without all of its heads"
        tier: Tier = RemoteTier(client, "server" if client.is_local else "tcp")
        if not client.is_local:
            slot_bytes = identity.layout.slot_bytes
            tier = StagedTier(tier, max(_STAGING_PIECES * PIECE_BYTES, _MIN_STAGING_BLOCKS * slot_bytes))
        return WorkerTransfer(
            tier,
            copier,
            batch_bytes=PIECE_BYTES,
            parts_per_block=max(1, identity.layout.block_tokens // identity.page_tokens),
            shares=ShareWriter(client, copier) if identity.num_ranks > 1 else None,
        )

    def _new_copier(self, tensors: Sequence[torch.Tensor]) -> Copier:
        identity = self._identity
        if not identity.is_opaque:
            return page_copier(tensors, identity.layout, first_head=identity.first_head(self._rank))
        part, num_parts = identity.part(self._rank), identity.num_parts
        return opaque_copier(OpaquePages(tensors, identity.num_pages, identity.layout, part=part, num_parts=num_parts))

    @property
    def _opened(self) -> WorkerTransfer:
        assert self._transfer is not None, "vLLM registers its pages before any step"
        return self._transfer

    def begin_step(self, plan: StepPlan, *, asks_by_layer: bool = False) -> None:
        """Before the step is queued on the device: order it after the loads that it may use.

        If vLLM asks for each layer (`wait_for_layer`), the step begins with the first layers that are there.
        """
        self._plan = plan
        if self._transfer is not None:
            self._transfer.begin_step(is_idle=plan.is_idle)
        self._arriving = [one for one in self._arriving if not one.copies.is_done]
        needed = [one for one in self._arriving if one.step <= plan.known_step]
        self._needed = [one.copies for one in needed]
        self._waits_by_layer = (
            asks_by_layer
            and not self._identity.is_opaque
            and not self._unasked_layers
            and all(one.number in plan.first_used for one in needed)  # before its wait, a layer may write anywhere else
        )
        if not self._waits_by_layer:
            for copies in self._needed:
                copies.precede(self._last_layer)

    def wait_for_layer(self, name: str) -> None:
        """Before vLLM queues the attention of this layer."""
        self._unasked_layers.discard(name)
        if self._waits_by_layer:
            for copies in self._needed:
                copies.precede(self._layer_numbers.get(name, self._last_layer))

    def start(self, plan: StepPlan) -> None:
        """Begin this step's loads."""
        self._ended |= plan.ended
        if not plan.loads:
            return
        self._opened.note_step()
        for load in plan.loads:
            key = str(load.number)
            self._loading[key] = load
            self._coming.add(key)
            places = self._places(load.pages, range(load.first_block, load.first_block + len(load.hashes)))
            self._opened.load(key, load.hashes, places, load.timeout_s, load.leased)

    def save(self, plan: StepPlan) -> None:
        """Begin this step's saves, after its forward pass was queued on the device.

        A few blocks wait a moment for those of later steps, since each batch is several calls to the server and takes
        the GIL from the engine. If a request waits for its pages to be freed, or nothing is computed, they do not wait.
        """
        if plan.saves:
            self._store(plan.saves)
        if self._transfer is not None:
            self._transfer.send(is_last=plan.is_idle or bool(self._ended))

    def _store(self, saves: Sequence[Save]) -> None:
        self._opened.note_step()
        for save in saves:
            first = save.first_block
            if save.slots is None:
                places = self._places(save.pages, range(first, first + len(save.hashes)))
                self._opened.store(self._key_of(save), save.hashes, places)
            else:
                places = self._places(save.pages, [first + number for number in save.slots.positions])
                self._opened.write_share(save.request_id, places, save.slots)

    def drop_saves(self, preempted: set[str]) -> None:
        """Return when no page of these requests is being copied, or will be."""
        if preempted:
            self._opened.drop(preempted)

    def results(self) -> KVConnectorTransferResults:
        """Loads and saves that ended since the last call."""
        sent: set[str] = set()
        received: set[str] = set()
        if self._transfer is not None:
            sent = self._note_saved(self._transfer.storing())
            if self._loading:
                received = self._note_loads(self._transfer.loads)
            for slots, is_written in self._transfer.take_shares():
                self._note_share(slots, is_written=is_written)
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(sent, received, failed)

    def _note_loads(self, loads: LoadNews) -> set[str]:
        """The requests whose loads have arrived."""
        received: set[str] = set()
        self._wait_for_loads(loads)
        arrived, over = loads.take()
        for ended in arrived:
            received.add(self._loading[ended.key].request_id)
            self._note_load(ended)
        for ended in over:
            self._note_over(ended)
        return received

    def take_bad_pages(self) -> set[int]:
        bad, self._bad_pages = self._bad_pages, set()
        return bad

    def take_news(self) -> WorkerNews:
        news, self._news = self._news, WorkerNews()
        news.step = self._plan.number
        return news

    def take_stats(self) -> CacheStats:
        stats, self._stats = self._stats, CacheStats()
        if self._transfer is not None:
            counted = (self._transfer.num_stored, self._transfer.num_refused)
            stats.stored_blocks += counted[0] - self._counted[0]
            stats.refused_blocks += counted[1] - self._counted[1]
            self._counted = counted
        return stats

    def close(self) -> None:
        """Finish pending saves, then disconnect."""
        if self._transfer is not None:
            self._transfer.close()
        else:
            self._client.close()

    def _key_of(self, save: Save) -> int | str:
        """The save's number if its pages are held for it, else its request: no request id equals a number."""
        if save.number is None:
            return save.request_id
        self._saving[save.number] = save
        return save.number

    def _note_saved(self, storing: Set[object]) -> set[str]:
        """Finished requests with no save in flight."""
        if not self._ended and not self._saving:
            return set()
        for number in self._saving.keys() - storing:
            del self._saving[number]
            self._news.saved.add(number)
        sent = self._ended - storing - {save.request_id for save in self._saving.values()}
        self._ended -= sent
        return sent

    def _wait_for_loads(self, loads: LoadNews) -> None:
        """Wait a moment if the step needs what is arriving, or computes nothing."""
        if not self._plan.is_idle and self._needed:
            loads.wait_for_ends(_ARRIVING_S)
        elif self._plan.is_idle and self._coming:
            loads.wait_for_arrival(_IDLE_WAIT_S)

    def _places(self, pages: Sequence[int], blocks: Sequence[int]) -> list[int]:
        return places_of(pages, blocks, page_tokens=self._identity.page_tokens, block_tokens=self._block_tokens)

    def _note_load(self, ended: EndedLoad) -> None:
        load = self._loading[ended.key]
        self._coming.discard(ended.key)
        self._arriving += [_Arriving(load.number, self._plan.number, copies) for copies in ended.arriving]
        if ended.num_loaded < ended.num_blocks:
            self._stats.failed_loads += not self._rank
            self._news.failed_loads.add(load.request_id)
            self._note_lost(load, ended.num_loaded)

    def _note_lost(self, load: PageLoad, num_loaded: int) -> None:
        """Full attention keeps the blocks before the lost one; other models compute the whole prompt."""
        if self._is_one_full:
            first_bad = (load.first_block + num_loaded) * self._block_tokens // self._identity.page_tokens
            self._bad_pages.update(load.pages[first_bad:])
        else:
            self._failed.add(load.request_id)

    def _note_over(self, ended: EndedLoad) -> None:
        load = self._loading.pop(ended.key)
        self._news.ended_loads[load.number] += 1
        parts = named_parts(ended.parts, load.stored_in)
        self._news.loaded += parts
        for part in parts:
            self._count_loaded(load, part)

    def _note_share(self, slots: ReservedRoom, *, is_written: bool) -> None:
        self._news.written[slots.job] += 1
        if not is_written:
            self._news.unwritten.add(slots.job)
        elif not self._rank:
            self._stats.stored_blocks += len(slots.offsets)

    def _count_loaded(self, load: PageLoad, part: Loaded) -> None:
        stats = self._stats
        num_tokens = load.num_tokens * part.nbytes // (len(load.hashes) * self._identity.layout.block_bytes)
        stats.loaded_bytes += part.nbytes
        stats.load_seconds += part.seconds
        if self._rank:
            return  # the first rank counts the tokens
        stats.count_loaded(place_of(part.tier), num_tokens)
