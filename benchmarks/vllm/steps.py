"""The connector's calls in each of vLLM's steps, for `benchmarks.vllm.test_scheduler_side`: many requests, no model.

Prompts are computed in chunks, then all requests decode together, as vLLM schedules them. Both sides of the connector
run in one thread, as in an engine with one rank; what passes between them is pickled, as vLLM does with several.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier.plugins.vllm.scheduling import SchedulerSide
from kvtier.plugins.vllm.working import WorkerSide

PREFILL, DECODE, FILLING = "chunk of a prompt", "decode", "decode that fills blocks"


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step: microseconds of both sides, the size of the plan, and how many saves it has."""

    scheduler_us: float
    worker_us: float
    num_bytes: int
    num_saves: int


@dataclass
class Steps:
    """Requests of one engine, whose pages are numbered as they are used. `costs` are those of its steps, by kind."""

    scheduler: SchedulerSide
    worker: WorkerSide
    page_tokens: int
    costs: defaultdict[str, list[StepCost]] = field(default_factory=lambda: defaultdict(list))
    _pages: dict[str, list[int]] = field(default_factory=dict)
    _num_pages: int = 0
    _num_unsaved: int = 0

    def add(self, request: Request, chunk_tokens: int) -> None:
        """Compute its prompt, in chunks."""
        self.scheduler.on_new_request(request)
        while self.scheduler.num_matched_tokens(request, 0) is None:
            time.sleep(0.001)
        self.scheduler.note_allocated(request, ([],), 0)
        while request.num_computed_tokens < request.num_tokens:
            count = min(chunk_tokens, request.num_tokens - request.num_computed_tokens)
            self._run(PREFILL, {request: count})
        request.append_output_token_ids(1)

    def decode(self, requests: Sequence[Request]) -> None:
        """One token of each."""
        is_filling = any((one.num_computed_tokens + 1) % self.page_tokens == 0 for one in requests)
        self._run(FILLING if is_filling else DECODE, {request: 1 for request in requests})
        for request in requests:
            request.append_output_token_ids(1)

    def settle(self) -> None:
        """Take idle steps until the server has all that was saved."""
        while self._num_unsaved > 0:
            self._step(SchedulerOutput.make_empty())
            time.sleep(0.001)

    def end(self, requests: Sequence[Request]) -> None:
        """Finish these requests, and wait until their pages are saved."""
        waiting = {one.request_id for one in requests if self.scheduler.finish(one)}
        while waiting:
            waiting -= self._step(SchedulerOutput.make_empty())[1].finished_sending or set()
            time.sleep(0.001)

    def _run(self, kind: str, counts: dict[Request, int]) -> None:
        cost, _ = self._step(self._output(counts))
        self.costs[kind].append(cost)
        for request, count in counts.items():
            request.num_computed_tokens += count

    def _output(self, counts: dict[Request, int]) -> SchedulerOutput:
        output, cached = SchedulerOutput.make_empty(), CachedRequestData.make_empty()
        for request, count in counts.items():
            pages = self._pages.setdefault(request.request_id, [])
            num_new = -(-(request.num_computed_tokens + count) // self.page_tokens) - len(pages)
            new = [self._num_pages + number for number in range(num_new)]
            self._num_pages += num_new
            if not pages:
                output.scheduled_new_reqs.append(_new_request(request, new))
            else:
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append((new,) if new else None)
                cached.num_computed_tokens.append(request.num_computed_tokens)
                cached.num_output_tokens.append(request.num_output_tokens)
            pages += new
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = {request.request_id: count for request, count in counts.items()}
        output.total_num_scheduled_tokens = sum(counts.values())
        return output

    def _step(self, output: SchedulerOutput) -> tuple[StepCost, KVConnectorOutput]:
        began_at = time.perf_counter()
        plan = self.scheduler.plan_step(output)
        planned_at = time.perf_counter()
        pickled = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        working_at = time.perf_counter()
        self.worker.begin_step(plan)
        self.worker.drop_saves(plan.preempted)
        self.worker.start(plan)
        self.worker.save(plan)
        results = self.worker.results()
        self.worker.take_bad_pages()
        stats = self.worker.take_stats()
        stats.to_vllm()
        news = self.worker.take_news()
        worked_at = time.perf_counter()
        done = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            kv_connector_worker_meta=news,
        )
        self.scheduler.note_transfers(done)
        self.scheduler.take_stats().to_vllm()
        self.scheduler.take_events()
        self._num_unsaved += sum(len(save.hashes) for save in plan.saves) - stats.stored_blocks - stats.refused_blocks
        scheduler_s = planned_at - began_at + time.perf_counter() - worked_at
        return StepCost(1e6 * scheduler_s, 1e6 * (worked_at - working_at), len(pickled), len(plan.saves)), done


def rows_of(costs: dict[str, list[StepCost]]) -> list[dict[str, object]]:
    """Medians by the kind of step."""
    return [
        {
            "step": kind,
            "scheduler, us": round(statistics.median(one.scheduler_us for one in many), 1),
            "worker, us": round(statistics.median(one.worker_us for one in many), 1),
            "plan, bytes": statistics.median(one.num_bytes for one in many),
            "saves": round(statistics.fmean(one.num_saves for one in many), 2),
            "steps": len(many),
        }
        for kind, many in costs.items()
    ]


def _new_request(request: Request, pages: list[int]) -> NewRequestData:
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
