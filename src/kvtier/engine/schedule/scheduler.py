"""Decides what each step computes: continuous batching, chunked prefill beside decodes, preemption. No torch.

Running requests go first; then waiting ones are admitted while tokens, places and blocks last: first come, first
served, with clients taking turns. A request that waits for a block which another is computing lets others pass. When
blocks run out, the newest request gives its blocks back and starts over later, from whatever is still cached. With
tiers below the device, a request first waits, beside the others, for their hits of its prompt: its `Prefetch` says when
it may be computed. A request for the log-probabilities of its prompt computes all of it, and uses no cached blocks.
Owned by the engine's thread.
"""

from __future__ import annotations

import time

from kvtier.engine.schedule.block_manager import BlockManager
from kvtier.engine.schedule.prompt_blocks import RequestBlocks
from kvtier.engine.schedule.request import FinishReason, Request, Status
from kvtier.engine.schedule.step import Step, StepRow
from kvtier.engine.schedule.waiting_line import WaitingLine
from kvtier.transfer.load import LoadPlan
from kvtier.transfer.prefetch_state import READY, WAIT, PrefetchState, Verdict
from kvtier.transfer.transfer import NoTransfer, Transfer


class Scheduler:
    """Holds requests from `add` until they are finished."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_requests: int,
        max_num_batched_tokens: int,
        transfer: Transfer | NoTransfer,
    ) -> None:
        """`transfer` loads prompts from tiers below the device, and stores full blocks there."""
        self.blocks = blocks
        self._transfer = transfer
        self.max_num_requests = max_num_requests
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = WaitingLine()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.at: Request | None = None
        """The request that `schedule` is working on: if it raises, this is the one that cannot be scheduled."""
        self._taken_in_s = 0.0
        self._free_slots = list(range(max_num_requests - 1, -1, -1))

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_unmatched(self) -> bool:
        """Whatever the last step is, the next one should follow at once: more can be loaded beside it."""
        return self._transfer.has_unmatched

    def add(self, request: Request) -> None:
        request.prefetch = self._transfer.begin(RequestBlocks(request, self.blocks))
        if request.lacks_prompt_scores:
            request.prefetch.finish()
        request.prefetch.offers_all = request.warms
        self.waiting.join(request)

    def note_taken_in(self, seconds: float) -> None:
        """How long taking in new requests took the engine's thread; the next step has less time for matching."""
        self._taken_in_s += seconds

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Its blocks come back at once: steps in flight that name it write only where later steps write again."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.blocks.note_computed(request)
            self._give_back(request)
        else:
            self.waiting.remove(request)
            request.prefetch.leave()
            self.blocks.free(request)
        request.status = Status.FINISHED
        request.finish_reason = reason

    def schedule(self) -> Step:
        """The next step. Rows that sample count one more token in flight; hand the step over, then call `submitted`."""
        self._poll()
        decodes: list[StepRow] = []
        prefills: list[StepRow] = []
        budget = self.max_num_batched_tokens
        num_preemptions = self.num_preemptions
        block_tokens = self.blocks.block_tokens
        running, finished = self.running, PrefetchState.FINISHED
        position = 0
        while position < len(running) and budget:
            request = self.at = running[position]
            start = request.num_computed
            remaining = request.num_tokens - start
            if remaining == 1 and start >= request.prompt_tokens and request.prefetch.state is finished:
                # The common case: one token, whose successor is sampled.
                if not request.may_sample:
                    position += 1
                    continue
                num_running = len(running)
                if start < len(request.blocks.ids) * block_tokens or self._make_room(request, start + 1):
                    request.num_computed = start + 1
                    request.num_in_flight += 1
                    decodes.append(StepRow(request, start, 1, True))
                    budget -= 1
                    position += 1
                elif num_running == len(running):
                    position += 1  # it waits for room, without having been preempted
                continue
            count = min(remaining, budget)
            verdict = request.prefetch.advance(count, is_alone=len(running) == 1)
            if not verdict.may_compute or (verdict is READY and not self._extend(request)):
                position += 1
                continue
            num_running = len(running)
            row = self._row(request, budget, verdict)
            if row is not None:
                (decodes if row.count == 1 else prefills).append(row)
                budget -= row.count
                position += 1
            elif num_running == len(running):
                position += 1  # it waits, without having been preempted
        if num_preemptions == self.num_preemptions and budget:
            self._admit(budget, decodes, prefills)
        self.at = None
        if self._transfer.has_tiers:
            self._start_early(decodes, prefills)
        rows = decodes + prefills
        step = Step(rows, self.blocks.take_copies(), sum(row.count for row in rows))
        if rows:
            step.arrivals = self._transfer.take_arrivals()
        else:  # an empty step is not handed over: the next one waits for arrivals
            self._transfer.send(is_last=True)
        return step

    def _poll(self) -> None:
        is_idle = all(request.prefetch.state is PrefetchState.LOADING for request in self.running)
        waiting = (request.prefetch for request in self.waiting if not request.num_in_flight)
        for lease in self._transfer.poll(waiting, is_idle=is_idle, taken_in_s=self._taken_in_s):
            self.blocks.release(lease)
        self._taken_in_s = 0.0

    def submitted(self, step: Step) -> None:
        """The step was handed to the device: its blocks are valid for later steps."""
        copied_ids = [block_id for copy in step.copies for block_id in (copy.source, copy.target)]
        self._transfer.note_step(copied_ids, is_full=step.num_tokens >= self.max_num_batched_tokens)
        for row in step.rows:
            self.blocks.note_computed(row.request)
        if self._transfer.has_tiers:
            for row in step.rows:
                row.request.prefetch.filled()
        self.blocks.note_submitted()
        self._transfer.send()

    def _extend(self, request: Request) -> bool:
        """Give a running request what the device has of its next tokens; False if it has to wait for some."""
        if request.lacks_prompt_scores:
            return True
        start = request.num_computed
        is_clear = self.blocks.extend(request)
        if not request.num_preemptions:
            request.cached_tokens += request.num_computed - start
        return is_clear

    def _start_early(self, decodes: list[StepRow], prefills: list[StepRow]) -> None:
        """Compute each layer of a prompt as soon as that layer of its prefix has arrived.

        Only if there is nothing else to do, or if the device has a step to do before this one and the rest arrives
        meanwhile. The step waits for one prompt at most; later prompts are for the next steps.
        """
        is_empty = not decodes and not prefills
        if self.has_unmatched if is_empty else not any(row.request.num_in_flight > 1 for row in decodes):
            return
        budget = self.max_num_batched_tokens - sum(row.count for row in (*decodes, *prefills))
        for request in list(self.running):
            if not budget or request.prefetch.load is None:
                continue
            if request.prefetch.start_early(is_alone=is_empty):
                row = self._row(request, budget, READY, may_preempt=is_empty)
                if row is not None:
                    (decodes if row.count == 1 else prefills).append(row)
                    budget -= row.count
            elif not is_empty:
                return  # later loads arrive after it
            if self._transfer.has_arrivals:
                return

    def _row(self, request: Request, budget: int, verdict: Verdict, *, may_preempt: bool = True) -> StepRow | None:
        """The next chunk of a prompt, with blocks for it; None if the request had to give way."""
        start, count = request.num_computed, verdict.num_tokens
        if count is None:
            count = self._chunk(request, min(request.num_tokens - start, budget))
        if not (self._make_room(request, start + count) if may_preempt else self.blocks.grow(request, start + count)):
            return None
        return self._take_row(request, start, count)

    def _chunk(self, request: Request, count: int) -> int:
        return count if request.lacks_prompt_scores else self.blocks.chunk(request, count)

    def _take_row(self, request: Request, start: int, count: int) -> StepRow:
        request.prefetch.announce()
        if not request.times.prefill_at:
            request.times.prefill_at = time.monotonic()
        request.num_computed = start + count
        samples = request.num_computed == request.num_tokens
        if samples:
            request.num_in_flight += 1
        return StepRow(request, start, count, samples, request.lacks_prompt_scores)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Take blocks for `num_tokens`, if need be from the newest requests. False if `request` was preempted itself.

        Also False if it has to wait for blocks that are being copied away.
        """
        while not self.blocks.grow(request, num_tokens):
            if self._transfer.may_wait_for_room():
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        assert len(self.running) > 1, "a request alone must always have room"
        self.running.remove(victim)
        self.blocks.note_computed(victim)
        self._give_back(victim)
        if victim.lacks_prompt_scores:
            victim.prefetch.finish()
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        victim.status = Status.WAITING
        self.waiting.appendleft(victim)

    def _admit(self, budget: int, decodes: list[StepRow], prefills: list[StepRow]) -> None:
        passed_over: list[Request] = []
        while self.waiting and budget and self._free_slots:
            request = self.at = self.waiting[0]
            if request.num_in_flight or request.prefetch.state is PrefetchState.UNASKED:
                break  # its last tokens are unknown after a preemption, or it was not matched yet
            self.waiting.popleft()
            if request.prefetch.is_matching:
                passed_over.append(request)
                continue
            verdict = self._admission(request)
            if verdict is WAIT:
                # It waits for a block or an answer, and holds nothing meanwhile.
                self._let_go(request)
                passed_over.append(request)
                continue
            count = self._take_blocks(request, verdict, budget)
            if count is None:
                self._let_go(request)
                self.waiting.appendleft(request)
                self._transfer.may_wait_for_room()
                break
            row = self._start(request, verdict, count, budget)
            if row is not None:
                (decodes if row.count == 1 else prefills).append(row)
                budget -= row.count
        self.waiting.extendleft(reversed(passed_over))

    def _admission(self, request: Request) -> Verdict | LoadPlan:
        """What a waiting request begins with, given the device's hits: a load, its own tokens, or nothing."""
        prefetch = request.prefetch
        if request.lacks_prompt_scores:
            return READY
        has_all = prefetch.state is PrefetchState.FINISHED
        if not self.blocks.extend(request, partially=has_all):
            return WAIT
        verdict = prefetch.admission()
        if verdict is READY and not has_all and not self.blocks.extend(request):
            return WAIT
        return verdict

    def _take_blocks(self, request: Request, verdict: Verdict | LoadPlan, budget: int) -> int | None:
        """Take blocks for a request's start. Returns how many tokens to compute at once; None if there is no room."""
        prefetch, block_tokens = request.prefetch, self.blocks.block_tokens
        num_free = self.blocks.num_free_blocks
        if isinstance(verdict, LoadPlan):
            has_room = prefetch.has_room(verdict.end, num_free)
            return 0 if has_room and prefetch.grow(verdict, is_alone=not self.running) else None
        start = request.num_computed
        count = self._chunk(request, min(request.num_tokens - start, budget))
        has_room = prefetch.has_room(-(-(start + count) // block_tokens), num_free)
        return count if has_room and self.blocks.grow(request, start + count) else None

    def _start(self, request: Request, verdict: Verdict | LoadPlan, count: int, budget: int) -> StepRow | None:
        """Start a request that has its first blocks. Returns its first row, unless it has to wait for a load."""
        prefetch, start = request.prefetch, request.num_computed
        if not isinstance(verdict, LoadPlan):
            prefetch.finish()
        request.status = Status.RUNNING
        self.waiting.note_admitted(request)
        request.slot = self._free_slots.pop()
        self.running.append(request)
        if not request.was_admitted:
            request.was_admitted = True
            request.cached_tokens = start
        prefetch.admit()
        if not isinstance(verdict, LoadPlan):
            return self._take_row(request, start, count)
        beside = prefetch.begin(verdict, min(request.num_tokens - start, budget))
        return self._row(request, budget, beside) if beside.may_compute else None

    def _let_go(self, request: Request) -> None:
        self.blocks.let_go(request)
        request.num_computed = 0

    def _give_back(self, request: Request) -> None:
        request.prefetch.filled()
        self._transfer.send(is_last=not self.running)
        request.prefetch.leave()
        self.blocks.free(request)
        self._free_slots.append(request.slot)
