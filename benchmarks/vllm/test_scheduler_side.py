"""The connector's share of vLLM's time on the host: of a prompt of 30,000 tokens, and of steps of 32 requests.

    .venv-vllm/bin/python -m benchmarks.vllm.test_scheduler_side [--quick] [--json FILE]

No engine runs, but a real cache server. For a prompt in vLLM's own cache, in the server, and in neither, this is the
scheduler's loop, which asks the connector, and asks again after an empty step: it reports the scheduler's time inside
the connector, the time from the request's arrival until its first step was planned, and what that step saves. Then 32
requests with contexts of 10,000 tokens decode together (`steps`). Without a connector, all of this takes no time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvtier
from benchmarks.harness import Result, finish, make_parser, print_table
from benchmarks.vllm.steps import DECODE, FILLING, PREFILL, StepCost, Steps, rows_of
from kvtier.blocks.hashing import block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.plugins.vllm.groups import Group
from kvtier.plugins.vllm.identity import BLOCK_TOKENS, Identity
from kvtier.plugins.vllm.plan import WorkerNews
from kvtier.plugins.vllm.scheduling import SchedulerSide
from kvtier.plugins.vllm.settings import ConnectorSettings
from kvtier.plugins.vllm.working import WorkerSide
from kvtier.testing.servers import cache_server
from kvtier.transfer.reach import AttentionKind, Reach

NUM_TOKENS = 30_000
EMPTY_STEP_S = 0.001
"""vLLM's engine process sleeps for this long after a step without work."""
NUM_STREAMS, CONTEXT_TOKENS, CHUNK_TOKENS = 32, 10_000, 8192
BARS = {
    "own_hit_scheduler_ms": "<= 1",
    "own_hit_planned_ms": "<= 1",
    "own_hit_saved_blocks": "<= 0",
    "host_hit_planned_ms": "<= 12",
    "decode_scheduler_us": "<= 100",
    "decode_worker_us": "<= 100",
}

_LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=16, dtype="float16", block_tokens=BLOCK_TOKENS)
_FIELDS = NamespaceFields(
    layout=_LAYOUT, weights="none", model_config={}, quantization="", compute_dtype="float16", salt=""
)


class OwnPages:
    """The part of vLLM's prefix cache that the connector uses."""

    hash_block_size = BLOCK_TOKENS

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.cached_block_hash_to_block: dict[bytes, object] = {}

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[object] | None:
        return [block_hash] if block_hash in self.hashes else None


@dataclass
class Trial:
    """One prompt, until its first step is planned."""

    scheduler_s: float = 0.0
    planned_s: float = 0.0
    num_asked: int = 0
    num_loaded: int = 0
    num_saved: int = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        started_at = time.perf_counter()
        yield
        self.scheduler_s += time.perf_counter() - started_at


@dataclass
class Scheduler:
    """The part of vLLM's scheduler that a single request needs."""

    side: SchedulerSide
    pool: OwnPages
    num_requests: int = 0
    loads: list[Any] = field(default_factory=list)

    def run(self, tokens: list[int], num_own: int) -> Trial:
        self.num_requests += 1
        request = _request(f"r{self.num_requests}", tokens)
        self.pool.hashes = set(request.block_hashes[: num_own // BLOCK_TOKENS])
        trial, started_at = Trial(), time.perf_counter()
        with trial.watched():
            self.side.on_new_request(request)
        while (num_external := self._ask(trial, request, num_own)) is None:
            self._step(trial, SchedulerOutput.make_empty())
            time.sleep(EMPTY_STEP_S)
        pages = list(range(1, 1 - (-len(tokens) // BLOCK_TOKENS)))
        with trial.watched():
            self.side.note_allocated(request, (pages,), num_external)
        trial.num_loaded = num_external
        if num_external:
            self._step(trial, SchedulerOutput.make_empty())
        else:
            self._step(trial, _first_step(request, num_own, pages))
        trial.planned_s = time.perf_counter() - started_at
        self._end(request)
        return trial

    def _ask(self, trial: Trial, request: Request, num_own: int) -> int | None:
        trial.num_asked += 1
        with trial.watched():
            return self.side.num_matched_tokens(request, num_own)

    def _step(self, trial: Trial, output: SchedulerOutput) -> None:
        with trial.watched():
            plan = self.side.plan_step(output)
        self.loads += plan.loads
        trial.num_saved += sum(len(save.hashes) for save in plan.saves)

    def _end(self, request: Request) -> None:
        """Its load has finished, and it ends."""
        news = WorkerNews()
        for load in self.loads:
            news.ended_loads[load.number] += 1
        finished = {load.request_id for load in self.loads}
        self.side.note_transfers(KVConnectorOutput(finished_recving=finished, kv_connector_worker_meta=news))
        self.loads = []
        self.side.finish(request)


def main() -> int:
    arguments = make_parser(__doc__ or "").parse_args()
    repeats = arguments.repeats or (5 if arguments.quick else 15)
    init_none_hash(sha256)
    parts, trials = measure(repeats)
    rows: list[dict[str, object]] = [{"part": name, "ms": round(1000 * seconds, 3)} for name, seconds in parts.items()]
    trial_rows = [_row(name, many) for name, many in trials.items()]
    figures = {
        "own_hit_scheduler_ms": _median_ms(trials["vLLM has it"], lambda one: one.scheduler_s),
        "own_hit_planned_ms": _median_ms(trials["vLLM has it"], lambda one: one.planned_s),
        "own_hit_saved_blocks": statistics.median(one.num_saved for one in trials["vLLM has it"]),
        "host_hit_planned_ms": _median_ms(trials["the server has it"], lambda one: one.planned_s),
    }
    print_table(f"parts, {NUM_TOKENS} tokens", rows)
    print_table("the scheduler's thread", trial_rows)
    costs, threads_us = measure_steps(100 if arguments.quick else 400)
    figures["decode_threads_us"] = threads_us
    for kind, name in {DECODE: "decode", FILLING: "filling", PREFILL: "prefill"}.items():
        figures |= _step_figures(name, costs[kind])
    step_rows = rows_of(costs)
    print_table(f"steps of {NUM_STREAMS} requests with {CONTEXT_TOKENS} tokens each", step_rows)
    settings = {
        "vllm": vllm.__version__,
        "tokens": NUM_TOKENS,
        "repeats": repeats,
        "streams": NUM_STREAMS,
        "context_tokens": CONTEXT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "bars": BARS,
    }
    result = Result("vllm.test_scheduler_side", settings, [*rows, *trial_rows, *step_rows], figures)
    return finish(result, BARS, arguments.json)


def _step_figures(name: str, costs: list[StepCost]) -> dict[str, float]:
    return {
        f"{name}_scheduler_us": round(statistics.median(one.scheduler_us for one in costs), 1),
        f"{name}_worker_us": round(statistics.median(one.worker_us for one in costs), 1),
        f"{name}_plan_bytes": statistics.median(one.num_bytes for one in costs),
    }


def measure(repeats: int) -> tuple[dict[str, float], dict[str, list[Trial]]]:
    trials: dict[str, list[Trial]] = {"vLLM has it": [], "the server has it": [], "neither has it": []}
    with cache_server(memory="1GiB") as server:
        known = [_tokens(number) for number in range(repeats)]
        with kvtier.connect(server.unix, layout=_LAYOUT, namespace=_FIELDS, name="bench") as client:
            for tokens in known:
                hashes = client.hashes(tokens)
                client.set(hashes, [bytes(_LAYOUT.block_bytes)] * len(hashes))
            parts = _parts(client, known[0])
        for number in range(repeats):
            with _scheduler(server.unix) as scheduler:  # a new process knows nothing of the prompt
                trials["the server has it"].append(scheduler.run(known[number], 0))
                time.sleep(0.05)
                own = (NUM_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                trials["vLLM has it"].append(scheduler.run(known[number], own))
                trials["neither has it"].append(scheduler.run(_tokens(1000 + number), 0))
    return parts, trials


def measure_steps(num_steps: int) -> tuple[dict[str, list[StepCost]], float]:
    """Prompts in chunks, then steps in which all requests decode. In half of those, four fill a block.

    Also returns the microseconds of CPU time that the connector's threads take per decode step.
    """
    num_pages = NUM_STREAMS * ((CONTEXT_TOKENS + num_steps) // BLOCK_TOKENS + 2)
    with cache_server(memory="1GiB") as server, _scheduler(server.unix) as scheduler:
        client = kvtier.connect(server.unix, layout=_LAYOUT, namespace=_FIELDS, name="bench")
        with closing(WorkerSide(client, _identity(), 0)) as worker:
            worker.register({"layer": torch.zeros(num_pages, 1, BLOCK_TOKENS, 2 * _LAYOUT.head_dim).half()})
            steps = Steps(scheduler.side, worker, BLOCK_TOKENS)
            requests = []
            for number in range(NUM_STREAMS):
                requests.append(_request(f"s{number}", _tokens(2000 + number)[: CONTEXT_TOKENS + number % 8]))
                steps.add(requests[-1], CHUNK_TOKENS)
            steps.settle()
            before_s = _threads_s()
            for _ in range(num_steps):
                steps.decode(requests)
                time.sleep(0.01)
            threads_us = 1e6 * (_threads_s() - before_s) / num_steps
            steps.end(requests)
    return steps.costs, round(threads_us, 1)


def _threads_s() -> float:
    """CPU time of all threads but this one."""
    return time.process_time() - time.thread_time()


def _identity() -> Identity:
    group = Group(Reach(AttentionKind.FULL, BLOCK_TOKENS), ("layer",), "", is_latent=False, is_handed_over=False)
    return Identity(
        layout=_LAYOUT,
        fields=_FIELDS,
        groups=(group,),
        page_tokens=BLOCK_TOKENS,
        num_ranks=1,
        num_parts=1,
        num_pages=1,
        name="bench",
        is_opaque=False,
    )


@contextmanager
def _scheduler(address: str) -> Iterator[Scheduler]:
    client = kvtier.connect(address, layout=_LAYOUT, namespace=_FIELDS, name="bench")
    settings = ConnectorSettings(server=address, always_load=True)
    side = SchedulerSide(client, _identity(), settings, CHUNK_TOKENS, "sha256")
    pool = OwnPages()
    side.bind(pool)  # type: ignore[arg-type]
    with closing(side):
        yield Scheduler(side, pool)


def _parts(client: Any, tokens: list[int]) -> dict[str, float]:
    """The least of a few trials."""
    hashes = client.hashes(tokens)

    def match_and_release() -> None:
        client.match_lazily(hashes).release()

    return {
        "vLLM's own hashes": _least(lambda: _request("part", tokens)),
        "tokens hashed before": _least(lambda: block_hashes(_FIELDS.digest(), tokens, BLOCK_TOKENS)),
        "match and release": _least(match_and_release),
        "reserve what is there": _least(lambda: client.reserve(hashes).close()),
    }


def _least(act: Callable[[], object], repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats):
        started_at = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started_at)
    return min(seconds)


def _tokens(seed: int) -> list[int]:
    return [(seed * 7919 + number * 31) % 150_000 for number in range(NUM_TOKENS)]


def _request(name: str, tokens: list[int]) -> Request:
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    return Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)


def _first_step(request: Request, num_computed: int, pages: list[int]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    new = SimpleNamespace(req_id=request.request_id, num_computed_tokens=num_computed, block_ids=(pages,))
    output.scheduled_new_reqs = [new]  # type: ignore[list-item]
    output.total_num_scheduled_tokens = min(CHUNK_TOKENS, request.num_tokens - num_computed)
    output.num_scheduled_tokens = {request.request_id: output.total_num_scheduled_tokens}
    return output


def _median_ms(trials: list[Trial], of: Callable[[Trial], float]) -> float:
    return round(1000 * statistics.median(map(of, trials)), 3)


def _row(name: str, trials: list[Trial]) -> dict[str, object]:
    return {
        "prompt": name,
        "in the connector, ms": _median_ms(trials, lambda one: one.scheduler_s),
        "until planned, ms": _median_ms(trials, lambda one: one.planned_s),
        "asked": statistics.median(one.num_asked for one in trials),
        "loaded tokens": trials[0].num_loaded,
        "saved blocks": statistics.median(one.num_saved for one in trials),
    }


if __name__ == "__main__":
    sys.exit(main())
