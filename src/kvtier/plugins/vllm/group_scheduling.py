"""The scheduler's side of an engine with several groups: windows, chunks and states beside full attention.

A load fetches what a boundary needs of every group, into the request's pages; if a block is missing, everything is
computed. A save copies the pages that a step fills. vLLM may free pages of windows and states after the next step, so
they are held until they are copied (`pins`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.plugins.vllm.events import ServerEvents
from kvtier.plugins.vllm.identity import Identity
from kvtier.plugins.vllm.pins import Pins
from kvtier.plugins.vllm.plan import Save
from kvtier.plugins.vllm.scheduling import SchedulerSide
from kvtier.plugins.vllm.settings import ConnectorSettings
from kvtier.plugins.vllm.tracked import Tracked, Wanted
from kvtier.tiers.tier import Tier
from kvtier.transfer.group_search import GroupSearch
from kvtier.transfer.leased_blocks import LeasedBlocks
from kvtier.transfer.lookup import Lookup, Search

if TYPE_CHECKING:  # older releases lack it
    from vllm.v1.core.sched.output import KVConnectorBlockState

_NULL_PAGE = 0
"""The entry of vLLM's tables for a page that a window or a state has left."""


class GroupSchedulerSide(SchedulerSide):
    """The scheduler's side of an engine with several groups, or one group that is not full attention."""

    def __init__(
        self,
        client: CacheClient,
        identity: Identity,
        settings: ConnectorSettings,
        chunk_tokens: int,
        hash_algorithm: str,
        events: ServerEvents | None = None,
    ) -> None:
        super().__init__(client, identity, settings, chunk_tokens, hash_algorithm, events)
        self._groups = identity.block_groups
        self._handed_over = [group.is_handed_over for group in identity.groups]
        self._pins = Pins()
        self._save_numbers = itertools.count()
        self._state: KVConnectorBlockState | None = None

    def bind(self, pool: BlockPool) -> None:
        super().bind(pool)
        self._pins.bind(pool)

    def _loads_whole(self, request: Request) -> bool:
        """Never: states at the end of a prompt already include its last token."""
        return False

    def _search_in(self, tier: Tier, identity: Identity) -> Search:
        return GroupSearch(tier, identity.block_groups)

    def _wanted(self, tracked: Tracked, tables: Sequence[list[int]], first: int, end: int) -> Wanted:
        """All blocks of these tokens that have a page: vLLM allocates none outside the reach of a group."""
        wanted: dict[BlockHash, int] = {}
        chain = tracked.lookup.hashes
        for group, (reach, table) in enumerate(zip(self._groups.reaches, tables, strict=True)):
            per_block = reach.block_tokens // self._block_tokens
            for number in range(first // per_block, min(end // per_block, len(table))):
                if table[number] != _NULL_PAGE:
                    wanted[self._groups.key(group, chain, number)] = table[number]
        return Wanted(list(wanted.values()), 0, list(wanted))

    def _leased(self, lookup: Lookup, wanted: Wanted, first: int, end: int) -> LeasedBlocks | None:
        return lookup.leased_among(wanted.hashes)

    def _in_memory(self, tracked: Tracked, num_external_tokens: int) -> int:
        """All tokens or none: a load waits for the last of its blocks."""
        lease = tracked.lookup.lease
        assert lease is not None
        return 0 if lease.num_stored else num_external_tokens

    # --- saving -------------------------------------------------------------------------------------------------------

    def _take_pages(self, output: SchedulerOutput) -> None:
        """Keep vLLM's report of each request's pages: some are freed while it runs."""
        self._state = output.kv_connector_block_state

    def _save_of(self, tracked: Tracked, first: int, end: int) -> Save | None:
        request_id = tracked.request.request_id
        tables = None if self._state is None else self._state.get_block_ids(request_id)
        if tables is None:
            return None
        tables = tuple(
            [] if is_handed_over else table for table, is_handed_over in zip(tables, self._handed_over, strict=True)
        )
        wanted = self._wanted(tracked, tables, first, end)
        states = self._states(tracked, end)
        pages, hashes = [*wanted.pages, *states.values()], [*wanted.hashes, *states]
        number = next(self._save_numbers)
        if not self._pins.hold(number, pages):
            return None
        return Save(request_id, pages, 0, hashes, number=number)

    def _states(self, tracked: Tracked, end: int) -> dict[BlockHash, int]:
        """Pages of states that this step completes, at boundaries where a prefix can be resumed."""
        assert self._state is not None
        states: dict[BlockHash, int] = {}
        for group, page, num_tokens in self._state.boundary_state_offloads.get(tracked.request.request_id, ()):
            is_boundary = num_tokens % self._unit_tokens == 0 and num_tokens <= end * self._block_tokens
            if self._handed_over[group] and is_boundary and page != _NULL_PAGE:
                number = num_tokens // self._groups.reaches[group].block_tokens - 1
                states[self._groups.key(group, tracked.lookup.hashes, number)] = page
        return states

    def _drop_saves(self, request_id: str) -> None:
        """Nothing: pages of a preempted request stay held until they are saved."""

    def _note_saved(self, numbers: Set[int]) -> None:
        for number in numbers:
            self._pins.release(number)
