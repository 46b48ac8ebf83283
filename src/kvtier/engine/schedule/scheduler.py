"""Decides what each step computes: continuous batching, chunked prefill beside decodes, preemption. No torch.

First come, first served. Running requests go first, then waiting ones are admitted while tokens, places and blocks
last. A request that waits for a block which another is computing lets others pass. When blocks run out, the request
that came last gives its blocks back and starts over later, from what is still cached. With tiers below the device, a
request first waits, beside the others, for what they have of its prompt. The engine's thread owns it.
"""

from __future__ import annotations

from collections import deque

from kvtier.engine.schedule.block_manager import BlockManager
from kvtier.engine.schedule.prompt_loading import PromptLoading
from kvtier.engine.schedule.request import FinishReason, Request, Status
from kvtier.engine.schedule.step import Step, StepRow


class Scheduler:
    """Requests from `add` until they are finished."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_requests: int,
        max_num_batched_tokens: int,
        loading: PromptLoading | None = None,
    ) -> None:
        """With `loading`, prompts are loaded from tiers below the device, and full blocks are offered to them."""
        self.blocks = blocks
        self._loading = loading
        self.max_num_requests = max_num_requests
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._taken_in_s = 0.0
        self._free_slots = list(range(max_num_requests - 1, -1, -1))

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_unmatched(self) -> bool:
        """Whatever the last step is, the next one should follow at once: more can be loaded beside it."""
        return self._loading is not None and self._loading.has_unmatched

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def note_taken_in(self, seconds: float) -> None:
        """How long it took the engine's thread to take in what was added; the next step has less time for matching."""
        self._taken_in_s += seconds

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
            if self._loading is not None:
                self._loading.leave(request)
            self.blocks.free(request)
        request.status = Status.FINISHED
        request.finish_reason = reason

    def leave(self, request: Request) -> None:
        """Nothing is loaded or promised for it any more."""
        if self._loading is not None:
            self._loading.leave(request)

    def schedule(self) -> Step:
        """The next step. Rows that sample count one more token in flight; hand the step over, then call `submitted`."""
        if self._loading is not None:
            is_idle = all(map(self._loading.waits_for_load, self.running))
            self._loading.poll(self.waiting, is_idle=is_idle, taken_in_s=self._taken_in_s)
            self._taken_in_s = 0.0
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
            if remaining == 1 and start >= request.prompt_tokens and request.fetch is None:
                # The common case: one token, whose successor is sampled.
                if not request.may_sample:
                    position += 1
                    continue
                num_running = len(self.running)
                if start < len(request.blocks.ids) * block_tokens or self._make_room(request, start + 1):
                    request.num_computed = start + 1
                    request.num_in_flight += 1
                    decodes.append(StepRow(request, start, 1, True))
                    budget -= 1
                    position += 1
                elif num_running == len(self.running):
                    position += 1  # it waits for room, and gave nothing up
                continue
            if not self._may_compute(request):
                position += 1
                continue
            num_running = len(self.running)
            row = self._row(request, budget)
            if row is not None:
                (decodes if row.count == 1 else prefills).append(row)
                budget -= row.count
                position += 1
            elif num_running == len(self.running):
                position += 1  # it waits, and gave nothing up
        if num_preemptions == self.num_preemptions and budget:
            self._admit(budget, decodes, prefills)
        if self._loading is not None:
            self._start_early(decodes, prefills)
        rows = decodes + prefills
        step = Step(rows, self.blocks.take_copies(), sum(row.count for row in rows))
        if self._loading is not None and not rows:
            self._loading.send_offers(is_last=True)
        if self._loading is not None and rows:  # an empty step is not handed over: the next one waits for them
            step.arrivals = self._loading.take_arrivals()
        return step

    def submitted(self, step: Step) -> None:
        """The step was handed to the device: what it computes is there for later steps."""
        if self._loading is not None:
            self._loading.note_step(step, is_full=step.num_tokens >= self.max_num_batched_tokens)
        for row in step.rows:
            self.blocks.note_computed(row.request)
            if self._loading is not None:
                self._loading.offer(row.request)
        self.blocks.note_submitted()
        if self._loading is not None:
            self._loading.send_offers()

    def _may_compute(self, request: Request) -> bool:
        """What is cached of its next tokens is given to a running request; False when it has to wait for some."""
        loading = self._loading
        if request.load is not None:
            assert loading is not None
            if not loading.advance(request):
                return False
            if request.load is not None:
                return True  # the rest comes from the back
        if loading is not None and request.fetch is not None:
            if not loading.is_growing(request) and not self._extend(request, partially=False):
                return False
            plan = loading.plan(request)
            if plan is None and loading.is_looking(request):
                return False
            if plan is not None and loading.grow(request, plan, is_alone=len(self.running) == 1):
                loading.begin(request, plan)
                return loading.may_compute_beside(request)
            loading.settle(request)
        return self._extend(request, partially=True)

    def _extend(self, request: Request, *, partially: bool) -> bool:
        start = request.num_computed
        is_clear = self.blocks.extend(request, partially=partially)
        if not request.num_preemptions:
            request.cached_tokens += request.num_computed - start
        return is_clear

    def _start_early(self, decodes: list[StepRow], prefills: list[StepRow]) -> None:
        """Compute each layer of a prompt as soon as that layer of its prefix is there.

        If nothing else is to be done; or if the device has a step to do before this one, and the rest comes meanwhile.
        The step waits for one prompt at most; those that come after it are for the next ones.
        """
        assert self._loading is not None
        is_empty = not decodes and not prefills
        if self._loading.has_unmatched if is_empty else not any(row.request.num_in_flight > 1 for row in decodes):
            return
        budget = self.max_num_batched_tokens - sum(row.count for row in (*decodes, *prefills))
        for request in list(self.running):
            if not budget or request.load is None:
                continue
            if self._loading.start_early(request, is_alone=is_empty):
                row = self._row(request, budget, may_preempt=is_empty)
                if row is not None:
                    (decodes if row.count == 1 else prefills).append(row)
                    budget -= row.count
            elif not is_empty:
                return  # others come behind it
            if self._loading.has_arrivals:
                return

    def _row(self, request: Request, budget: int, *, may_preempt: bool = True) -> StepRow | None:
        """The next chunk of a prompt, with blocks for it; None when the request had to give way."""
        start = request.num_computed
        count = min(request.num_tokens - start, budget)
        if request.load is not None:
            assert self._loading is not None
            count = self._loading.claim(request, count)
            if not count:
                return None
        else:
            count = self.blocks.chunk(request, count)
        if not (self._make_room(request, start + count) if may_preempt else self.blocks.grow(request, start + count)):
            return None
        return self._take_row(request, start, count)

    def _take_row(self, request: Request, start: int, count: int) -> StepRow:
        if self._loading is not None:
            self._loading.announce(request)
        request.num_computed = start + count
        samples = request.num_computed == request.num_tokens
        if samples:
            request.num_in_flight += 1
        return StepRow(request, start, count, samples)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens`, from those that came last if need be; False when the request itself was the last.

        Or when it has to wait for blocks that are being copied away.
        """
        while not self.blocks.grow(request, num_tokens):
            if self._loading is not None and self._loading.may_wait_for_room():
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
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        victim.status = Status.WAITING
        self.waiting.appendleft(victim)

    def _admit(self, budget: int, decodes: list[StepRow], prefills: list[StepRow]) -> None:
        passed_over: list[Request] = []
        loading = self._loading
        while self.waiting and budget and self._free_slots:
            request = self.waiting[0]
            if request.num_in_flight:
                break  # it was preempted, and its last tokens are not known yet
            if loading is not None and request.fetch is None:
                break  # it is not looked for yet
            self.waiting.popleft()
            if loading is not None and not loading.is_matched(request):
                passed_over.append(request)
                continue
            is_clear = self.blocks.extend(request, partially=loading is None)
            plan = None
            if is_clear and loading is not None:
                is_clear = loading.is_useful(request)
                plan = loading.plan(request) if is_clear else None
                if is_clear and plan is None:
                    is_clear = loading.is_through(request) and self.blocks.extend(request)
            if not is_clear:
                # Waits for a block or an answer under way, holding on to nothing meanwhile.
                self._let_go(request)
                passed_over.append(request)
                continue
            start = request.num_computed
            if plan is not None and loading is not None:
                has_grown = loading.has_room(request, plan.end * self.blocks.block_tokens)
                has_grown = has_grown and loading.grow(request, plan, is_alone=not self.running)
            else:
                count = self.blocks.chunk(request, min(request.num_tokens - start, budget))
                has_grown = loading is None or loading.has_room(request, start + count)
                has_grown = has_grown and self.blocks.grow(request, start + count)
            if not has_grown:
                self._let_go(request)
                self.waiting.appendleft(request)
                if loading is not None:
                    loading.may_wait_for_room()
                break
            if loading is not None and plan is None:
                loading.settle(request)
            request.status = Status.RUNNING
            request.slot = self._free_slots.pop()
            self.running.append(request)
            request.num_offered = request.num_there // self.blocks.block_tokens
            if not request.was_admitted:
                request.was_admitted = True
                request.cached_tokens = start
            if loading is not None and start:
                loading.offer_again(request)
            if plan is not None and loading is not None:
                loading.begin(request, plan)
                row = self._row(request, budget) if loading.may_compute_beside(request) else None
                if row is None:
                    continue
            else:
                row = self._take_row(request, start, count)
            (decodes if row.count == 1 else prefills).append(row)
            budget -= row.count
        self.waiting.extendleft(reversed(passed_over))

    def _let_go(self, request: Request) -> None:
        self.blocks.let_go(request)
        request.num_computed = 0

    def _give_back(self, request: Request) -> None:
        if self._loading is not None:
            self._loading.offer(request)
            self._loading.send_offers(is_last=not self.running)
            self._loading.leave(request)
        self.blocks.free(request)
        self._free_slots.append(request.slot)
