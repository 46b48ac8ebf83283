"""What the scheduler's side plans for each step, without an engine: full blocks once, and else nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvtier
from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.plugins.vllm.groups import Group
from kvtier.plugins.vllm.identity import Identity
from kvtier.plugins.vllm.plan import StepPlan, WorkerNews
from kvtier.plugins.vllm.scheduling import SchedulerSide
from kvtier.plugins.vllm.settings import ConnectorSettings
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.transfer.reach import AttentionKind, Reach
from tests.support.waiting import wait_until

_TOKENS = 16
_LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=16, dtype="float16", block_tokens=_TOKENS)
_FIELDS = NamespaceFields(
    layout=_LAYOUT, weights="none", model_config={}, quantization="", compute_dtype="float16", salt=""
)
_GROUP = Group(Reach(AttentionKind.FULL, _TOKENS), ("layer",), "", is_latent=False, is_handed_over=False)
_IDENTITY = Identity(
    layout=_LAYOUT,
    fields=_FIELDS,
    groups=(_GROUP,),
    page_tokens=_TOKENS,
    num_ranks=1,
    num_parts=1,
    num_pages=1,
    name="steps",
    is_opaque=False,
)


class WatchedRequest(Request):
    """Counts how often its length is read."""

    num_looks = 0

    @property
    def num_tokens(self) -> int:
        self.num_looks += 1
        return super().num_tokens


class OwnPages:
    """The part of vLLM's prefix cache that the connector uses."""

    hash_block_size = _TOKENS

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.cached_block_hash_to_block: dict[bytes, object] = {}

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[object] | None:
        return [block_hash] if block_hash in self.hashes else None


@dataclass
class Engine:
    """Schedules as vLLM does; `lag` steps pass until the tokens of a step are known."""

    side: SchedulerSide
    own: OwnPages
    lag: int = 0
    num_pages: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    saved: dict[BlockHash, int] = field(default_factory=dict)
    unknown: list[list[Request]] = field(default_factory=list)
    looked_at: list[str] = field(default_factory=list)
    """The requests whose length the last plan has read."""

    def add(self, name: str, tokens: list[int], num_own_pages: int = 0) -> WatchedRequest:
        """Of which vLLM's own cache has some pages."""
        hasher = get_request_block_hasher(_TOKENS, sha256)
        request = WatchedRequest(name, tokens, SamplingParams(max_tokens=1000), None, block_hasher=hasher)
        self.own.hashes = set(request.block_hashes[:num_own_pages])
        request.num_computed_tokens = num_own_pages * _TOKENS
        self.side.on_new_request(request)
        self.match(request)
        return request

    def match(self, request: Request) -> None:
        self._num_matched(request)
        self.side.note_allocated(request, ([],), 0)

    def load(self, name: str, seed: int) -> Request:
        """A prompt of four blocks that the server has; its load begins with the next step."""
        tokens = _tokens(4 * _TOKENS, seed)
        client: CacheClient = vars(self.side)["_client"]
        hashes = block_hashes(_FIELDS.digest(), tokens, _TOKENS)
        client.set(hashes, [bytes(_LAYOUT.block_bytes)] * len(hashes))
        hasher = get_request_block_hasher(_TOKENS, sha256)
        request = Request(name, tokens, SamplingParams(max_tokens=1000), None, block_hasher=hasher)
        self.own.hashes = set()
        self.side.on_new_request(request)
        count = self._num_matched(request)
        self.side.note_allocated(request, (list(range(4)),), count)
        request.num_computed_tokens = count
        return request

    def report_loaded(self, names: Collection[str], failed: Collection[str] = (), step: int = 0) -> None:
        """The results of a step in which these loads arrived."""
        news = WorkerNews(step, failed_loads=set(failed))
        self.side.note_transfers(KVConnectorOutput(finished_recving=set(names), kv_connector_worker_meta=news))

    def num_matched(self, tokens: list[int]) -> int:
        """How many of these tokens, of a new prompt, the side offers to load."""
        hasher = get_request_block_hasher(_TOKENS, sha256)
        request = Request("asked", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        self.own.hashes = set()
        self.side.on_new_request(request)
        return self._num_matched(request)

    def _num_matched(self, request: Request) -> int:
        while (found := self.side.num_matched_tokens(request, request.num_computed_tokens)) is None:
            time.sleep(0.001)
        return found

    def wait_for_answers(self) -> None:
        """Prompts shorter than a block are looked up only when they have grown, and no step waits for that."""
        lookups = [tracked.lookup for tracked in vars(self.side)["_tracked"].values()]
        wait_until(lambda: all(one.matching is None or one.matching.done() for one in lookups), "answers")

    def step(
        self, counts: dict[Request, int], preempted: set[str] | None = None, resumed: set[str] | None = None
    ) -> StepPlan:
        output, cached = SchedulerOutput.make_empty(), CachedRequestData.make_empty()
        for request, count in counts.items():
            name = request.request_id
            is_new, first = name not in self.pages, len(self.pages.get(name, ()))
            needed = -(-(request.num_computed_tokens + count) // _TOKENS)
            new = list(range(self.num_pages, self.num_pages + needed - first))
            self.num_pages += len(new)
            self.pages.setdefault(name, []).extend(new)
            if is_new and name not in (resumed or ()):
                output.scheduled_new_reqs.append(_new(request, new))
                continue
            cached.req_ids.append(name)
            sent = self.pages[name] if name in (resumed or ()) else new
            cached.new_block_ids.append((list(sent),) if sent else None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.num_output_tokens.append(request.num_output_tokens)
        cached.resumed_req_ids = resumed or set()
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = {request.request_id: count for request, count in counts.items()}
        output.total_num_scheduled_tokens = sum(counts.values())
        output.preempted_req_ids = preempted
        looks = {one: one.num_looks for one in counts if isinstance(one, WatchedRequest)}
        plan = self.side.plan_step(output)
        self.looked_at = [one.request_id for one, before in looks.items() if one.num_looks > before]
        for save in plan.saves:
            for number, block_hash in enumerate(save.hashes):
                assert block_hash not in self.saved, "a block is saved twice"
                self.saved[block_hash] = save.pages[number]
        self._compute(counts)
        return plan

    def _compute(self, counts: dict[Request, int]) -> None:
        for request, count in counts.items():
            request.num_computed_tokens += count
        self.unknown.append([one for one in counts if one.num_computed_tokens >= one.num_prompt_tokens])
        while len(self.unknown) > self.lag:
            for request in self.unknown.pop(0):
                request.append_output_token_ids(7)

    def expected(self, request: Request, end: int) -> dict[BlockHash, int]:
        """The blocks before block `end`, and their pages."""
        hashes = block_hashes(_FIELDS.digest(), list(request.all_token_ids)[: end * _TOKENS], _TOKENS)
        return dict(zip(hashes, self.pages[request.request_id], strict=False))


def _new(request: Request, pages: list[int]) -> NewRequestData:
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_ids=(list(pages),),
        num_computed_tokens=request.num_computed_tokens,
        lora_request=None,
    )


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """No worker saves anything in it."""
    with cache_server() as process:
        yield process


@contextmanager
def _engine(server: ServerProcess, lag: int = 0, **settings: Any) -> Iterator[Engine]:
    init_none_hash(sha256)
    client = kvtier.connect(server.unix, layout=_LAYOUT, namespace=_FIELDS, name="steps", timeout_s=30)
    chosen = ConnectorSettings(server=server.unix, match_timeout_s=30, **settings)
    with closing(SchedulerSide(client, _IDENTITY, chosen, 64, "sha256")) as side:
        own = OwnPages()
        side.bind(own)  # type: ignore[arg-type]
        yield Engine(side, own, lag)


def _tokens(count: int, seed: int = 0) -> list[int]:
    return [1000 * seed + number for number in range(count)]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_each_full_block_is_saved_once_when_its_tokens_are_known(server: ServerProcess, lag: int) -> None:
    dice = random.Random(lag)
    with _engine(server, lag) as engine:
        requests = [engine.add(str(number), _tokens(dice.randrange(5, 90), number)) for number in range(6)]
        for _ in range(120):
            counts: dict[Request, int] = {}
            for request in dice.sample(requests, dice.randrange(1, 7)):
                left = request.num_prompt_tokens - request.num_computed_tokens
                counts[request] = min(dice.randrange(1, 40), left) if left > 0 else 1
            engine.step(counts)
        engine.wait_for_answers()
        for _ in range(lag + 1):  # what was not known yet is saved in the next steps
            engine.step(dict.fromkeys((one for one in requests if one.num_computed_tokens < one.num_tokens + lag), 1))

        for request in requests:
            end = min(request.num_computed_tokens - 1 - lag, request.num_tokens) // _TOKENS
            assert end > 2
            assert engine.expected(request, end).items() <= engine.saved.items()


def test_a_decode_that_fills_no_block_is_not_looked_at_and_sends_nothing(server: ServerProcess) -> None:
    with _engine(server) as engine:
        requests = [engine.add(str(number), _tokens(40, number)) for number in range(3)]
        engine.step(dict.fromkeys(requests, 40))
        assert engine.looked_at == ["0", "1", "2"]

        for _ in range(7):  # tokens 40 to 46
            plan = engine.step(dict.fromkeys(requests, 1))
            assert not engine.looked_at
            assert plan == StepPlan(plan.number)

        assert [len(save.hashes) for save in engine.step(dict.fromkeys(requests, 1)).saves] == [1, 1, 1]


def test_a_resumed_request_is_looked_at_in_its_first_step(server: ServerProcess) -> None:
    """It may have lost its saves, and what it has to compute may be less than a block."""
    with _engine(server) as engine:
        request = engine.add("one", _tokens(40))
        engine.step({request: 40})
        del engine.pages["one"]
        engine.saved.clear()  # dropped with its pages
        engine.step({}, preempted={"one"})
        request.num_computed_tokens = 0
        engine.match(request)  # the server has nothing of it
        request.num_computed_tokens = 35  # vLLM still does
        engine.pages["one"] = [100, 101, 102]
        engine.num_pages = 103

        engine.step({request: 3}, resumed={"one"})

        assert list(engine.saved) == list(engine.expected(request, 2))


def test_what_a_preempted_request_was_saving_is_saved_again_though_vllm_still_has_it(server: ServerProcess) -> None:
    tokens = _tokens(40, 8)
    with _engine(server) as engine:
        request = engine.add("one", tokens)
        engine.step({request: 40})
        expected = engine.expected(request, 2)
        assert engine.saved == expected
        engine.saved.clear()
        engine.step({}, preempted={"one"})  # the worker drops what it has not copied yet
        engine.own.hashes = set(request.block_hashes)
        request.num_computed_tokens = 32
        engine.match(request)

        engine.step({request: 8}, resumed={"one"})

        assert engine.saved == expected
        other = engine.add("other", tokens, num_own_pages=2)
        engine.saved.clear()
        engine.step({other: 8})
        assert not engine.saved, "it was given to the server by now"


def test_answers_are_left_out_if_only_prompts_are_stored(server: ServerProcess) -> None:
    with _engine(server, store="prompt") as engine:
        request = engine.add("one", _tokens(40))
        engine.step({request: 40})
        for _ in range(40, 64):
            engine.step({request: 1})

        assert list(engine.saved) == list(engine.expected(request, 2))


@pytest.mark.parametrize(("num_tokens", "num_own_pages"), [(160, 9), (165, 10)])
def test_what_the_server_has_been_given_is_not_saved_again_after_vllms_own_hit(
    server: ServerProcess, num_tokens: int, num_own_pages: int
) -> None:
    """vLLM computes the last page of a prompt again."""
    tokens = _tokens(num_tokens, 5)
    with _engine(server) as engine:
        cold = engine.add("cold", tokens)
        engine.step({cold: num_tokens})
        assert len(engine.saved) == 10
        assert engine.side.finish(cold)

        warm = engine.add("warm", tokens, num_own_pages)
        plan = engine.step({warm: num_tokens - num_own_pages * _TOKENS})

        assert not plan.saves
        assert not engine.side.finish(warm), "its pages are free at once"


def test_what_follows_vllms_own_hit_is_saved(server: ServerProcess) -> None:
    with _engine(server) as engine:
        cold = engine.add("cold", _tokens(160, 6))
        engine.step({cold: 160})
        longer = engine.add("longer", _tokens(200, 6), num_own_pages=10)
        engine.step({longer: 40})

        assert list(engine.saved) == list(engine.expected(longer, 12))


def test_a_prompt_that_the_server_has_whole_is_not_saved_again(server: ServerProcess) -> None:
    tokens = _tokens(64, 7)
    hashes = block_hashes(_FIELDS.digest(), tokens, _TOKENS)
    with kvtier.connect(server.unix, layout=_LAYOUT, namespace=_FIELDS, name="steps", timeout_s=30) as client:
        client.set(hashes, [bytes(_LAYOUT.block_bytes)] * len(hashes))
    with _engine(server, always_load=True) as engine:
        request = engine.add("one", tokens)
        engine.step({request: 64})

        assert not engine.saved


@pytest.mark.parametrize(("seconds", "others", "num_loaded"), [(0.1, 0, 48), (0.001, 0, 64), (0.1, 1, 64)])
def test_a_prompt_is_loaded_without_its_last_page_if_that_takes_long_and_nothing_else_is_asked(
    server: ServerProcess, seconds: float, others: int, num_loaded: int
) -> None:
    tokens = _tokens(4 * _TOKENS, seed=700)
    with _engine(server, whole_prompts=True, always_load=True) as engine:
        client: CacheClient = vars(engine.side)["_client"]
        hashes = block_hashes(_FIELDS.digest(), tokens, _TOKENS)
        client.set(hashes, [bytes(_LAYOUT.block_bytes)] * len(hashes))
        vars(engine.side)["_decision"].note_load("server", 4 * _LAYOUT.block_bytes, seconds)
        for number in range(others):
            engine.add(f"other {number}", _tokens(40, seed=701 + number))

        assert engine.num_matched(tokens) == num_loaded


def test_a_step_names_the_loads_that_it_is_the_first_to_use(server: ServerProcess) -> None:
    with _engine(server, always_load=True) as engine:
        loaded = [engine.load(str(number), seed=710 + number) for number in range(4)]
        engine.report_loaded(["0", "1", "2", "3"], failed=["1"])
        engine.side.finish(loaded[2])

        assert engine.step({}).first_used == set()
        assert engine.step({loaded[0]: 1, loaded[1]: 1}).first_used == {0}
        assert engine.step({loaded[0]: 1, loaded[3]: 1}).first_used == {3}
        assert engine.step({loaded[3]: 1}).first_used == set()


def test_a_prompt_that_is_loaded_whole_is_not_only_read(server: ServerProcess) -> None:
    with _engine(server, always_load=True, whole_prompts=True) as engine:
        vars(engine.side)["_decision"].note_load("server", 4 * _LAYOUT.block_bytes, 0.001)
        loaded = engine.load("whole", seed=720)
        engine.report_loaded(["whole"])

        assert engine.step({loaded: 1}).first_used == set()


def test_a_plan_says_up_to_which_step_the_results_are_known(server: ServerProcess) -> None:
    with _engine(server, always_load=True) as engine:
        engine.load("a", seed=730)
        assert [engine.step({}).known_step for _ in range(2)] == [0, 0]
        engine.report_loaded(["a"], step=1)
        assert engine.step({}).known_step == 1
