"""A worker's side by itself: what it saves and loads of opaque pages, alone and beside other ranks."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import kvtier
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import OpaqueLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.plugins.vllm.groups import Group
from kvtier.plugins.vllm.identity import Identity
from kvtier.plugins.vllm.plan import PageLoad, Save, StepPlan
from kvtier.plugins.vllm.working import WorkerSide
from kvtier.testing.servers import ServerProcess
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
