"""Decides what each step computes: continuous batching, chunked prefill beside decodes, preemption. No torch.

First come, first served. Running requests go first, then waiting ones are admitted while tokens, places and blocks
last. A request that waits for a block which another is computing lets others pass. When blocks run out, the request
that came last gives its blocks back and starts over later, from what is still cached. The engine's thread owns it.
"""

from __future__ import annotations

from collections import deque

from kvtier.engine.block_manager import BlockManager
from kvtier.engine.request import FinishReason, Request, Status
from kvtier.engine.step import Step, StepRow


class Scheduler:
    """Requests from `add` until they are finished."""

    def __init__(self, blocks: BlockManager, *, max_num_requests: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_requests = max_num_requests
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_requests - 1, -1, -1))

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Its blocks come back at once: steps under way that name it write only where later steps write again."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.blocks.note_computed(request)
            self._give_back(request)
        else:
            self.waiting.remove(request)
            self.blocks.free(request)
        request.status = Status.FINISHED
        request.finish_reason = reason

    def schedule(self) -> Step:
        """The next step. Rows that sample count one more token in flight; hand the step over, then call `submitted`."""
        decodes: list[StepRow] = []
        prefills: list[StepRow] = []
        budget = self.max_num_batched_tokens
        num_preemptions = self.num_preemptions
        block_tokens = self.blocks.block_tokens
        position = 0
        while position < len(self.running) and budget:
            request = self.running[position]
            start = request.num_computed
            remaining = request.num_tokens - start
            if remaining == 1 and start >= request.prompt_tokens:
                # The common case: one token, whose successor is sampled.
                if not request.may_sample:
                    position += 1
                    continue
                if start < len(request.blocks.ids) * block_tokens or self._make_room(request, start + 1):
                    request.num_computed = start + 1
                    request.num_in_flight += 1
                    decodes.append(StepRow(request, start, 1, True))
                    budget -= 1
                    position += 1
                continue
            is_clear = self.blocks.extend(request)
            if not request.num_preemptions:
                request.cached_tokens += request.num_computed - start
            if not is_clear:
                position += 1
                continue
            row = self._row(request, budget)
            if row is not None:
                (decodes if row.count == 1 else prefills).append(row)
                budget -= row.count
                position += 1
        if num_preemptions == self.num_preemptions and budget:
            self._admit(budget, decodes, prefills)
        rows = decodes + prefills
        return Step(rows, self.blocks.take_copies(), sum(row.count for row in rows))

    def submitted(self, step: Step) -> None:
        """The step was handed to the device: what it computes is there for later steps."""
        for row in step.rows:
            self.blocks.note_computed(row.request)
        self.blocks.note_submitted()

    def _row(self, request: Request, budget: int) -> StepRow | None:
        """The next chunk of a prompt, with blocks for it; None when the request had to give way."""
        start = request.num_computed
        count = self.blocks.chunk(request, min(request.num_tokens - start, budget))
        if not self._make_room(request, start + count):
            return None
        return self._take_row(request, start, count)

    def _take_row(self, request: Request, start: int, count: int) -> StepRow:
        request.num_computed = start + count
        samples = request.num_computed == request.num_tokens
        if samples:
            request.num_in_flight += 1
        return StepRow(request, start, count, samples)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens`, from those that came last if need be; False when the request itself was the last."""
        while not self.blocks.grow(request, num_tokens):
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
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        victim.status = Status.WAITING
        self.waiting.appendleft(victim)

    def _admit(self, budget: int, decodes: list[StepRow], prefills: list[StepRow]) -> None:
        passed_over: list[Request] = []
        while self.waiting and budget and self._free_slots:
            request = self.waiting[0]
            if request.num_in_flight:
                break  # it was preempted, and its last tokens are not known yet
            self.waiting.popleft()
            if not self.blocks.extend(request):
                # Waits for a block under way, holding on to nothing meanwhile.
                self.blocks.let_go(request)
                request.num_computed = 0
                passed_over.append(request)
                continue
            start = request.num_computed
            count = self.blocks.chunk(request, min(request.num_tokens - start, budget))
            if not self.blocks.grow(request, start + count):
                self.blocks.let_go(request)
                request.num_computed = 0
                self.waiting.appendleft(request)
                break
            request.status = Status.RUNNING
            request.slot = self._free_slots.pop()
            self.running.append(request)
            if not request.was_admitted:
                request.was_admitted = True
                request.cached_tokens = start
            row = self._take_row(request, start, count)
            (decodes if row.count == 1 else prefills).append(row)
            budget -= row.count
        self.waiting.extendleft(reversed(passed_over))

    def _give_back(self, request: Request) -> None:
        self.blocks.free(request)
        self._free_slots.append(request.slot)
