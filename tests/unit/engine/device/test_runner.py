"""What the runner does around the layers of a model, with a stand-in for CUDA graphs that computes on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier.engine.config import EngineConfig
from kvtier.engine.device import chunk_graphs, decode_graphs, runner
from kvtier.engine.device.decode_graphs import Forward
from kvtier.engine.device.runner import Constrain, Runner, Submitted
from kvtier.engine.engine import Engine
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import Step, StepRow
from kvtier.kernels import reference
from kvtier.kernels.paged_batch import PagedBatch
from kvtier.kernels.upload import Download
from kvtier.testing.tiny_models import save_tiny_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=11, temperature=0.0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=7, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
]
KERNELS = ("place_words", "argmax_tokens")
"""Twins of kernels that are one launch each on a GPU, as a download is. Uploads are there, but not seen on a CPU."""
NO_LAUNCH = {
    "aten.alias", "aten.detach", "aten.empty", "aten.lift_fresh", "aten.select", "aten.slice", "aten.split", "aten.t",
    "aten.transpose", "aten.unbind", "aten.unsqueeze", "aten.view",
}  # fmt: skip


class Launches(TorchDispatchMode):  # type: ignore[misc]
    """Notes what would be launched on a GPU, in order: a graph and a twin of a kernel as one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._depth = 0

    def one(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, noted as `name` with all it does."""

        def noted(*args: Any) -> Any:
            self.names.append(name)
            self._depth += 1
            try:
                return call(*args)
            finally:
                self._depth -= 1

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0]
        if not self._depth and name not in NO_LAUNCH and not name.startswith("prim"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class StandInGraph:
    """Computes again from where the inputs lie, and leaves the result where it was."""

    def __init__(self, forward: Forward, tokens: torch.Tensor, batch: PagedBatch, launches: Launches) -> None:
        self.hidden = forward(tokens, batch).clone()
        self._forward, self._tokens, self._batch = forward, tokens, batch
        self._batch._plans.clear()
        self.replay = launches.one("graph", self._replay)

    def _replay(self) -> None:
        self.hidden.copy_(self._forward(self._tokens, self._batch))
        self._batch._plans.clear()  # plain torch plans a batch once, but here its numbers change


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What the runners of this test launch, which have stand-ins for graphs."""
    launches = Launches()

    def capture(
        forward: Forward, tokens: torch.Tensor, batch: PagedBatch, memory: tuple[int, int]
    ) -> tuple[StandInGraph, torch.Tensor]:
        graph = StandInGraph(forward, tokens, batch, launches)
        return graph, graph.hidden

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(decode_graphs, "capture_graph", capture)
    monkeypatch.setattr(chunk_graphs, "capture_graph", capture)
    for name in KERNELS:
        monkeypatch.setattr(reference, name, launches.one(name, getattr(reference, name)))
    monkeypatch.setattr(runner, "Download", launches.one("download", Download))
    return launches


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen2")
    return folder


def new_engine(folder: Path, *, has_graphs: bool, **settings: Any) -> Engine:
    values = {"kv_cache_space": 1 << 20, "max_num_batched_tokens": 50, **settings}
    engine = Engine(EngineConfig(model=str(folder), device="cpu", **values))
    if has_graphs:
        engine.runner = Runner(
            engine.loaded.model,
            engine.arena,
            max_num_requests=engine.config.max_num_requests,
            max_model_len=engine.max_model_len,
            max_graph_rows=8,
            max_graph_tokens=64,
        )
    return engine


def prompts(*lengths: int) -> list[list[int]]:
    dice = random.Random(1)
    return [[dice.randrange(300) for _ in range(length)] for length in lengths]


def answered(engine: Engine, params: list[SamplingParams]) -> list[Request]:
    """Requests of several lengths that do not begin and end together."""
    requests = []
    for number, prompt in enumerate(prompts(1, 90, 17, 40, 5, 16, 33, 8)):
        requests += engine.add(f"r{number}", prompt, params[number % len(params)])
        engine.step()
    while engine.has_requests:
        engine.step()
    for number in range(len(requests)):
        engine.forget(f"r{number}")
    return requests


@pytest.mark.parametrize("schedule", ["sync", "async-1", "async-2"])
@pytest.mark.parametrize("params", [[GREEDY], MIXED], ids=["greedy", "mixed"])
def test_steps_through_graphs_give_the_answers_of_single_launches(
    model_folder: Path, launches: Launches, schedule: str, params: list[SamplingParams]
) -> None:
    expected = answered(new_engine(model_folder, has_graphs=False, schedule=schedule), params)
    engine = new_engine(model_folder, has_graphs=True, schedule=schedule)

    for _ in range(2):  # of the second round much is cached
        launches.names.clear()
        for found, other in zip(answered(engine, params), expected, strict=True):
            assert found.output_tokens == other.output_tokens
            for one, expected_one in zip(found.logprobs, other.logprobs, strict=True):
                assert one == pytest.approx(expected_one, abs=1e-4)
        assert launches.names.count("graph") > 15


def test_requests_that_were_preempted_get_their_answers(model_folder: Path, launches: Launches) -> None:
    long = [SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)]
    plain = new_engine(model_folder, has_graphs=False, schedule="async-2")
    few_bytes = 14 * plain.arena.layout.block_bytes
    engine = new_engine(model_folder, has_graphs=True, schedule="async-2", kv_cache_space=few_bytes)

    found = answered(engine, long)

    assert sum(request.num_preemptions for request in found) > 0
    assert [one.output_tokens for one in found] == [one.output_tokens for one in answered(plain, long)]


def launched_by_steps(engine: Engine, launches: Launches) -> list[tuple[Step, list[str]]]:
    """The steps of three greedy requests, of which the last two begin in one step."""
    steps = []
    submit = engine.runner.submit

    def noted(step: Step, constrain: Constrain | None) -> Submitted:
        launches.names.clear()
        with launches:
            submitted = submit(step, constrain)
        steps.append((step, list(launches.names)))
        return submitted

    engine.runner.submit = noted  # type: ignore[method-assign]
    engine.add("r0", prompts(20)[0], GREEDY)
    engine.step()
    for number, prompt in enumerate(prompts(7, 9), 1):
        engine.add(f"r{number}", prompt, GREEDY)
    while engine.has_requests:
        engine.step()
    return steps


@pytest.mark.parametrize("schedule", ["sync", "async-2"])
def test_little_is_launched_around_the_graph_of_a_greedy_step(
    model_folder: Path, launches: Launches, schedule: str
) -> None:
    engine = new_engine(model_folder, has_graphs=True, schedule=schedule)

    steps = launched_by_steps(engine, launches)

    decodes = [names for step, names in steps if step.num_tokens == len(step.rows)]
    chunks = [names for step, names in steps if step.num_tokens > len(step.rows)]
    assert len(decodes) >= 10
    for names in decodes:
        assert names == ["place_words", "graph", "aten.linear", "argmax_tokens", "download"]
    assert len(chunks) >= 2
    for names in chunks:
        assert names == ["place_words", "graph", "aten.index", "aten.linear", "argmax_tokens", "download"]


def test_a_request_that_moves_to_another_slot_is_fed_from_there(model_folder: Path) -> None:
    """As after a preemption, when no step in between has sampled for anybody."""
    tested = new_engine(model_folder, has_graphs=False).runner
    request = Request("r", prompts(5)[0], GREEDY, max_tokens=4)
    request.blocks.ids = [0]
    sampled = []

    for slot, start, count in ((0, 0, 5), (3, 0, 5), (3, 5, 1), (3, 6, 1)):
        request.slot, request.num_in_flight = slot, max(start + count - 4, 1)
        sampled += tested.submit(Step([StepRow(request, start, count, True)], [], count)).wait()

    known = Request("k", [*request.tokens, sampled[0].token_id, sampled[2].token_id], GREEDY, max_tokens=4)
    known.blocks.ids, known.num_in_flight = [1], 1
    (expected,) = tested.submit(Step([StepRow(known, 0, 7, True)], [], 7)).wait()
    assert sampled[1] == sampled[0]
    assert sampled[3] == expected


class Event:
    """Of a step that ends when somebody waits for it."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


def test_a_step_without_tokens_is_waited_for_if_its_end_is_known() -> None:
    event = Event()
    submitted = Submitted([], is_long=True, over=cast(torch.cuda.Event, event))
    assert not submitted.is_done
    assert submitted.wait() == []
    assert event.is_over
    assert submitted.is_done
    assert Submitted([]).is_done
