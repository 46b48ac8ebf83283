"""A worker's side by itself: what it saves and loads of opaque pages, alone and beside other ranks."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvtier
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout, OpaqueLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.plugins.vllm.groups import Group
from kvtier.plugins.vllm.identity import Identity
from kvtier.plugins.vllm.plan import PageLoad, Save, StepPlan
from kvtier.plugins.vllm.working import WorkerSide
from kvtier.testing.servers import ServerProcess
from kvtier.transfer.load_news import EndedLoad, LoadNews
from kvtier.transfer.reach import AttentionKind, Reach
from kvtier.transfer.shared_stores import SharedStores
from tests.support.waiting import wait_until

_PAGES, _TOKENS, _LATENT, _LAYERS = 8, 16, 576, ("a", "b")
_PAGE_BYTES = len(_LAYERS) * _TOKENS * _LATENT * 2
_HASHES = [BlockHash(bytes([number]) * 32) for number in range(3)]


def _identity(num_ranks: int) -> Identity:
    """MLA's: every rank has all latents of a token."""
    layout = OpaqueLayout(nbytes=_PAGE_BYTES, block_tokens=_TOKENS)
    group = Group(Reach(AttentionKind.FULL, _TOKENS), _LAYERS, "latents", is_latent=True, is_handed_over=False)
    return Identity(
        layout=layout,
        fields=NamespaceFields(
            layout=layout, weights="w", model_config={}, quantization="", compute_dtype="float16", salt=""
        ),
        groups=(group,),
        page_tokens=_TOKENS,
        num_ranks=num_ranks,
        num_parts=1,
        num_pages=_PAGES,
        name="latents",
        is_opaque=True,
    )


def _client(server: ServerProcess, identity: Identity) -> CacheClient:
    return kvtier.connect(server.unix, layout=identity.layout, namespace=identity.fields, name="latents", timeout_s=30)


class _Rank:
    def __init__(self, server: ServerProcess, identity: Identity, rank: int) -> None:
        generator = torch.Generator().manual_seed(1)
        memory = torch.randn(len(_LAYERS), _PAGES, 1, _TOKENS, _LATENT, generator=generator).half()
        self.pages = dict(zip(_LAYERS, memory, strict=True))
        self.before = memory.clone()
        self.side = WorkerSide(_client(server, identity), identity, rank)
        self.side.register(self.pages)

    def load(self, pages: list[int], hashes: list[BlockHash]) -> None:
        """Bring blocks into pages, and wait until all of them are there."""
        load = PageLoad(0, "request", pages, 0, hashes, 30.0, None, len(hashes) * _TOKENS)
        self.side.start(StepPlan(1, loads=[load]))
        wait_until(lambda: "request" in self.side.results().finished_recving, "loaded")

    def is_copied(self, pages: Sequence[int], sources: Sequence[int]) -> bool:
        now = torch.stack([self.pages[name] for name in _LAYERS])
        return torch.equal(now[:, list(pages)], self.before[:, list(sources)])


@contextlib.contextmanager
def _ranks(server: ServerProcess, count: int) -> Iterator[list[_Rank]]:
    ranks = [_Rank(server, _identity(count), rank) for rank in range(count)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.side.close()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[CacheClient]:
    with _client(server, _identity(1)) as client:
        yield client


def test_a_preempted_request_with_the_name_of_a_save_leaves_that_save_alone(
    server: ServerProcess, client: CacheClient
) -> None:
    saved: set[int] = set()
    with _ranks(server, 1) as (rank,):
        server.send_signal(signal.SIGSTOP)
        try:
            rank.side.save(StepPlan(1, saves=[Save("request", [1], 0, _HASHES[:1], number=5)]))
            rank.side.drop_saves({"5"})
        finally:
            server.send_signal(signal.SIGCONT)

        def is_saved() -> bool:
            rank.side.save(StepPlan(2, is_idle=True))
            rank.side.results()
            saved.update(rank.side.take_news().saved)
            return saved == {5}

        wait_until(is_saved, "the save reported")
        wait_until(lambda: client.contains(_HASHES[:1]) == [True], "the block stored")


def test_saves_of_several_steps_are_stored_together_when_one_of_their_requests_ends(
    server: ServerProcess, client: CacheClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    reserve = CacheClient.reserve

    def reserve_and_note(client: CacheClient, hashes: Sequence[BlockHash], **named: Any) -> Any:
        reserved.append(len(hashes))
        return reserve(client, hashes, **named)

    monkeypatch.setattr(CacheClient, "reserve", reserve_and_note)
    with _ranks(server, 1) as (rank,):
        for number in range(3):
            plan = StepPlan(number, saves=[Save(str(number), [number + 1], 0, _HASHES[number : number + 1])])
            rank.side.begin_step(plan)
            rank.side.save(plan)
            assert not rank.side.results().finished_sending
        last = StepPlan(3, ended={"1"})
        rank.side.start(last)
        rank.side.save(last)

        wait_until(lambda: rank.side.results().finished_sending == {"1"}, "the request's pages free")
        wait_until(lambda: client.contains(_HASHES) == [True] * 3, "the blocks stored")
        assert sum(reserved) == 3
        assert len(reserved) < 3


def test_a_preempted_request_whose_saves_wait_for_others_is_not_saved(
    server: ServerProcess, client: CacheClient
) -> None:
    with _ranks(server, 1) as (rank,):
        saves = [Save("kept", [1], 0, _HASHES[:1]), Save("preempted", [2], 0, _HASHES[1:2])]
        rank.side.save(StepPlan(1, saves=saves))
        rank.side.drop_saves({"preempted"})
        rank.pages["a"][2] = 0.0  # its page is another request's by now
        rank.side.save(StepPlan(2, is_idle=True))

        wait_until(lambda: client.contains(_HASHES[:1]) == [True], "the other block stored")
        assert client.contains(_HASHES[:2]) == [True, False]


def test_saves_that_wait_for_others_are_stored_before_the_worker_closes(
    server: ServerProcess, client: CacheClient
) -> None:
    with _ranks(server, 1) as (rank,):
        rank.side.save(StepPlan(1, saves=[Save("request", [1], 0, _HASHES[:1])]))

    assert client.contains(_HASHES[:1]) == [True]


def test_latents_are_written_by_two_ranks_and_loaded_by_both(server: ServerProcess, client: CacheClient) -> None:
    with _ranks(server, 2) as ranks, ThreadPoolExecutor(1) as threads:
        shared: SharedStores[Save] = SharedStores(client, 2, threads)
        save = Save("request", [1, 2, 3], 0, list(_HASHES))
        shared.begin(save.request_id, save.hashes, save)
        ready: list[Save] = []

        def is_ready() -> bool:
            ready.extend(Save("request", one.pages, 0, one.hashes, slots) for one, slots in shared.take_ready())
            return bool(ready)

        wait_until(is_ready, "room reserved")
        for rank in ranks:
            rank.side.save(StepPlan(1, saves=ready))

        def is_stored() -> bool:
            for rank in ranks:
                rank.side.results()
                news = rank.side.take_news()
                shared.note(news.written, news.unwritten)
            return client.contains(_HASHES) == [True] * 3

        wait_until(is_stored, "blocks stored")
        for rank in ranks:
            rank.load([4, 5, 6], list(_HASHES))
            assert rank.is_copied([4, 5, 6], [1, 2, 3])
        shared.close()


# --- steps beside the last bytes of a load ----------------------------------------------------------------------------


class _Copies:
    """Copies under way; records the layers that work on the device was ordered after."""

    num_bytes_left = 1

    def __init__(self) -> None:
        self.is_done = False
        self.preceded: list[int] = []

    def wait(self) -> None:
        pass

    def precede(self, layer: int) -> None:
        self.preceded.append(layer)


class _Transfer:
    """Loads that are reported when the test says so."""

    num_stored = num_refused = 0

    def __init__(self) -> None:
        self.loads = LoadNews()
        self.ended: list[EndedLoad] = []

    def begin_step(self, *, is_idle: bool) -> None:
        pass

    def note_step(self) -> None:
        pass

    def load(self, key: str, hashes: list[BlockHash], places: Sequence[int], *rest: object) -> None:
        self.ended.append(EndedLoad(key, len(hashes)))

    def send(self, *, is_last: bool) -> None:
        pass

    def storing(self) -> set[object]:
        return set()

    def take_shares(self) -> list[tuple[object, bool]]:
        return []

    def close(self) -> None:
        pass


class _EarlyLoads:
    """A worker whose loads are reported before their last copies are done."""

    def __init__(self, client: CacheClient, identity: Identity) -> None:
        self.side = WorkerSide(client, identity, 0)
        self.transfer = _Transfer()
        vars(self.side)["_transfer"] = self.transfer
        self.layers = identity.layer_names

    def report(self, step: int) -> _Copies:
        """A load that is reported in this step, while its last copies are under way."""
        plan = StepPlan(step, step - 1, is_idle=True)
        plan.loads = [PageLoad(step, f"request {step}", [1], 0, _HASHES[:1], 30.0, None, _TOKENS)]
        copies = _Copies()
        self.side.begin_step(plan)
        self.side.start(plan)
        load = self.transfer.ended[-1]
        load.num_loaded, load.arriving = 1, [copies]
        self.transfer.loads.arrive(load)
        assert self.side.results().finished_recving == {f"request {step}"}
        return copies

    def step(
        self, number: int, known_step: int, used: Collection[int] = (), *, asks_by_layer: bool, ask: bool = True
    ) -> None:
        self.side.begin_step(StepPlan(number, known_step, first_used=set(used)), asks_by_layer=asks_by_layer)
        for name in self.layers if asks_by_layer and ask else ():
            self.side.wait_for_layer(name)


@pytest.fixture
def own_identity() -> Identity:
    layout = KvLayout(layers=2, kv_heads=1, head_dim=16, dtype="float16", block_tokens=_TOKENS)
    group = Group(Reach(AttentionKind.FULL, _TOKENS), _LAYERS, "", is_latent=False, is_handed_over=False)
    fields = NamespaceFields(
        layout=layout, weights="w", model_config={}, quantization="", compute_dtype="float16", salt=""
    )
    return replace(_identity(1), layout=layout, fields=fields, groups=(group,), name="own", is_opaque=False)


@pytest.fixture
def early(server: ServerProcess, own_identity: Identity) -> Iterator[_EarlyLoads]:
    early = _EarlyLoads(_client(server, own_identity), own_identity)
    try:
        yield early
    finally:
        early.side.close()
        vars(early.side)["_client"].close()


def test_a_step_waits_for_each_layer_of_a_load_when_vllm_asks_for_it(early: _EarlyLoads) -> None:
    early.step(1, 0, asks_by_layer=True)
    copies = early.report(2)
    early.step(3, 2, [2], asks_by_layer=True)
    assert copies.preceded == [0, 1]

    early.side.wait_for_layer("a layer with another's memory")
    assert copies.preceded == [0, 1, 1]


def test_a_step_waits_for_all_of_a_load_before_vllm_has_asked_for_every_layer(early: _EarlyLoads) -> None:
    early.side.wait_for_layer(early.layers[0])
    copies = early.report(2)
    early.step(3, 2, [2], asks_by_layer=True, ask=False)

    assert copies.preceded == [1]


@pytest.mark.parametrize(("asks_by_layer", "used"), [(False, [2]), (True, []), (True, [7])])
def test_a_graph_of_all_layers_and_a_step_that_may_write_into_a_load_wait_for_all_of_it(
    early: _EarlyLoads, asks_by_layer: bool, used: list[int]
) -> None:
    early.step(1, 0, asks_by_layer=True)
    copies = early.report(2)
    early.step(3, 2, used, asks_by_layer=asks_by_layer)

    assert copies.preceded == [1]


def test_one_load_that_the_step_may_write_into_makes_it_wait_for_all_loads(early: _EarlyLoads) -> None:
    early.step(1, 0, asks_by_layer=True)
    used, ended = early.report(2), early.report(3)
    used.preceded.clear()
    early.step(4, 3, [2], asks_by_layer=True)

    assert used.preceded == ended.preceded == [1]


def test_a_step_planned_before_the_scheduler_knew_of_a_load_does_not_wait_for_it(early: _EarlyLoads) -> None:
    copies = early.report(2)
    early.step(3, 1, asks_by_layer=False)
    assert not copies.preceded
    early.step(4, 2, asks_by_layer=False)
    assert copies.preceded == [1]
    copies.is_done = True
    early.step(5, 3, asks_by_layer=False)

    assert copies.preceded == [1]
