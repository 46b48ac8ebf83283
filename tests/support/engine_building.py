"""A scheduler with a simulated device: what the tests of the engine's torch-free side are built from.

The device's KV is a number for each place of each block: the checksum of all tokens up to the one that was computed
there. It samples a token from the checksum of the whole prefix, so a wrong block, a stale copy or a token out of order
shows at once, in the step that reads it. Steps run when they are handed over; their tokens become known
`num_steps_ahead` steps later, as with a real device.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.blocks.namespace import Namespace
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.block_manager import BlockManagerName, make_block_manager
from kvtier.engine.schedule.request import FinishReason, Request, Status
from kvtier.engine.schedule.scheduler import Scheduler
from kvtier.engine.schedule.step import Step, StepRow
from kvtier.transfer.transfer import NoTransfer

MANAGERS: tuple[BlockManagerName, ...] = ("naive", "disable_prefix_caching", "prefix_caching", "yoco")
CACHING_MANAGERS: tuple[BlockManagerName, ...] = ("prefix_caching", "yoco")
NAMESPACE = Namespace(bytes(range(32)))
VOCAB_SIZE = 24
STOP_TOKEN = 0
"""Sampled, it ends a request; in a prompt it is a token like any other."""

_GREEDY = SamplingParams(temperature=0.0)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)
"""Of a request that asks how likely its prompt is. Nobody tells it here: it goes on asking."""

Place = tuple[int, int]


def checksums(tokens: Sequence[int]) -> list[int]:
    """For each token, a number that names all tokens up to it."""
    sums = []
    value = 0
    for token in tokens:
        value = _with_token(value, token)
        sums.append(value)
    return sums


def _with_token(checksum: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), checksum)


def sampled_after(checksum: int) -> int:
    return (checksum >> 7) % VOCAB_SIZE


def answer_to(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The answer that any request with this prompt must get."""
    answer: list[int] = []
    checksum = checksums(prompt)[-1]
    while len(answer) < max_tokens and STOP_TOKEN not in answer[-1:]:
        answer.append(sampled_after(checksum))
        checksum = _with_token(checksum, answer[-1])
    return answer


class SimulatedDevice:
    """Runs steps in order, and fails where a row would read KV that is not that of its own tokens."""

    def __init__(self, block_tokens: int, num_slots: int) -> None:
        self.block_tokens = block_tokens
        self.kv: dict[Place, int] = {}
        self.num_times_computed: Counter[tuple[int, int]] = Counter()
        """By position and checksum of the prefix that ends there. Not what is computed without being written."""
        self.num_computed_for: Counter[Request] = Counter()
        self._tokens: dict[Request, list[int]] = {}
        self._last_tokens = [STOP_TOKEN] * num_slots

    def run(self, step: Step, running: Sequence[Request]) -> list[tuple[StepRow, int]]:
        """The rows that sample, with their tokens."""
        self._check_shape(step)
        self._check_writers(step, running)
        self._copy(step)
        sums = {row.request: self._read(row) for row in step.rows}
        sampled = []
        for row in step.rows:
            for position in range(row.start, row.start + row.count):
                checksum = sums[row.request][position]
                if row.writes:
                    self.kv[self._place(row.request, position)] = checksum
                    self.num_times_computed[position, checksum] += 1
            self.num_computed_for[row.request] += row.count
            if row.samples:
                sampled.append((row, self._sample(row, sums[row.request])))
        return sampled

    def _check_shape(self, step: Step) -> None:
        counts = [row.count for row in step.rows]
        assert all(count > 0 for count in counts)
        assert all(row.writes or (row.count == 1 and row.samples) for row in step.rows), "KV that is there is computed"
        assert step.num_tokens == sum(counts)
        assert sorted(counts, key=lambda count: count > 1) == counts, "rows of one token come first"
        assert len({row.request for row in step.rows}) == len(step.rows), "a request has one row"
        slots = [row.request.slot for row in step.rows]
        assert len(set(slots)) == len(slots), "two requests in one slot"

    def _check_writers(self, step: Step, running: Sequence[Request]) -> None:
        """No block is written that anybody else has."""
        holders = Counter(block_id for request in running for block_id in set(request.blocks.ids))
        written = [copy.target for copy in step.copies]
        for row in step.rows:
            ids = row.request.blocks.ids
            written_by_row = set(ids[row.start // self.block_tokens : self._num_blocks(row)])
            assert len(ids) >= self._num_blocks(row), f"{row.request} has no block to write to"
            if row.writes:
                assert all(holders[block_id] == 1 for block_id in written_by_row), "a block with two writers"
        assert len(set(written)) == len(written), "two copies into one block"

    def _num_blocks(self, row: StepRow) -> int:
        return -(-(row.start + row.count) // self.block_tokens)

    def _copy(self, step: Step) -> None:
        sources = [
            {offset: self.kv.get((copy.source, offset)) for offset in range(self.block_tokens)} for copy in step.copies
        ]
        for copy, numbers in zip(step.copies, sources, strict=True):
            for offset, checksum in numbers.items():
                self.kv.pop((copy.target, offset), None)
                if checksum is not None:
                    self.kv[copy.target, offset] = checksum

    def _read(self, row: StepRow) -> list[int]:
        """The checksums of the row's request, all of them found where its attention reads them."""
        request = row.request
        own = self._tokens.setdefault(request, list(request.tokens))
        assert request.tokens == own[: len(request.tokens)], "the tokens are not those that were sampled"
        if row.start + row.count > len(request.tokens):
            assert row.count == 1, "only the last token can be on the device"
            assert own[row.start] == self._last_tokens[request.slot], "the slot holds another token"
        sums = checksums(own)
        for position in range(row.start if row.writes else row.start + row.count):
            assert self.kv.get(self._place(request, position)) == sums[position], (
                f"{request} reads foreign KV at position {position}"
            )
        return sums

    def _sample(self, row: StepRow, sums: list[int]) -> int:
        own = self._tokens[row.request]
        assert row.start + row.count == len(own), "sampled from the middle"
        token = sampled_after(sums[-1])
        own.append(token)
        self._last_tokens[row.request.slot] = token
        return token

    def _place(self, request: Request, position: int) -> Place:
        block, offset = divmod(position, self.block_tokens)
        return request.blocks.ids[block], offset


@dataclass(frozen=True, slots=True)
class _UnderWay:
    sampled: list[tuple[StepRow, int]]


class SimulatedEngine:
    """The engine's loop over a scheduler and a `SimulatedDevice`."""

    def __init__(
        self,
        manager: BlockManagerName = "prefix_caching",
        *,
        num_blocks: int = 64,
        block_tokens: int = 4,
        chunk: int = 1 << 20,
        num_steps_ahead: int = 0,
        max_num_requests: int = 16,
    ) -> None:
        self.block_manager = make_block_manager(manager, num_blocks, block_tokens, NAMESPACE)
        self.scheduler = Scheduler(
            self.block_manager, max_num_requests=max_num_requests, max_num_batched_tokens=chunk, transfer=NoTransfer()
        )
        self.device = SimulatedDevice(block_tokens, max_num_requests)
        self.num_steps_ahead = num_steps_ahead
        self.requests: list[Request] = []
        self.steps: list[Step] = []
        self._under_way: deque[_UnderWay] = deque()

    @property
    def max_model_len(self) -> int:
        """As in the engine: one block stays spare."""
        return (self.block_manager.num_blocks - 1) * self.block_manager.block_tokens

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or bool(self._under_way)

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 1, *, client: str = "", params: SamplingParams = _GREEDY
    ) -> Request:
        room = self.max_model_len - len(prompt)
        assert room > 0, "the engine refuses such a prompt"
        request = Request(str(len(self.requests)), prompt, params, max_tokens=min(max_tokens, room), client=client)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, FinishReason.ABORT)

    def step(self) -> Step:
        """One turn of the engine's loop: hand over a step, look at the results that are due."""
        step = self.scheduler.schedule()
        if not step.is_empty:
            self._under_way.append(_UnderWay(self.device.run(step, self.scheduler.running)))
            self.scheduler.submitted(step)
            self.steps.append(step)
        else:
            self.check_nothing_to_do(step)
        if self._under_way and (step.is_empty or len(self._under_way) > self.num_steps_ahead):
            self._look_at(self._under_way.popleft())
        self.check_blocks()
        return step

    def run(self, max_steps: int = 20_000) -> None:
        """Run until nothing is left to do."""
        for _ in range(max_steps):
            if not self.has_work:
                self.check_idle()
                return
            self.step()
        raise AssertionError("the requests do not end")

    def check_nothing_to_do(self, step: Step) -> None:
        """A step was empty: that has a reason."""
        assert not step.copies, "copies without a step are never made"
        assert self._under_way or not self.scheduler.has_requests, "requests wait for nothing"

    def held_ids(self) -> set[int]:
        """Blocks that are being copied away."""
        return set()

    def check_blocks(self) -> None:
        """Free blocks and those that running requests have, or stores hold, make up the pool; who waits has none."""
        used = {block_id for request in self.scheduler.running for block_id in request.blocks.ids} | self.held_ids()
        assert self.block_manager.num_free_blocks + len(used) == self.block_manager.num_blocks
        assert all(not request.blocks.ids for request in self.scheduler.waiting)
        assert all(not request.blocks.ids for request in self.requests if request.status is Status.FINISHED)

    def check_idle(self) -> None:
        """Nothing is leaked, every request that was not aborted has its answer, and cached and computed add up."""
        assert self.block_manager.num_free_blocks == self.block_manager.num_blocks
        for request in self.requests:
            expected = answer_to(request.tokens[: request.prompt_tokens], request.max_tokens)
            if request.finish_reason is FinishReason.ABORT:
                assert request.output_tokens == expected[: request.num_outputs]
            else:
                assert request.status is Status.FINISHED
                assert request.output_tokens == expected
            if request.finish_reason is FinishReason.LENGTH and not request.num_preemptions:
                num_needed = request.prompt_tokens + request.num_outputs - 1
                num_loaded = sum(request.prefetch.history.loaded_tokens.values())
                assert request.cached_tokens + num_loaded + self.num_computed(request) == num_needed

    def num_computed(self, request: Request) -> int:
        """Tokens of the request that any step has computed."""
        return self.device.num_computed_for[request]

    def _look_at(self, under_way: _UnderWay) -> None:
        for row, token in under_way.sampled:
            request = row.request
            request.num_in_flight -= 1
            if request.status is Status.FINISHED:
                continue
            request.tokens.append(token)
            if token == STOP_TOKEN:
                self.scheduler.finish(request, FinishReason.STOP)
            elif request.num_outputs >= request.max_tokens:
                self.scheduler.finish(request, FinishReason.LENGTH)


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Tokens that look random; prompts of one seed are prefixes of each other."""
    return [1 + zlib.crc32(b"%d %d" % (seed, place)) % 1000 for place in range(length)]


def endless_prompt(length: int, max_tokens: int, *, stem: Sequence[int] = ()) -> list[int]:
    """A prompt that begins with `stem` and whose answer does not end by itself within `max_tokens`."""
    return next(
        prompt
        for seed in range(1000, 20_000)
        if STOP_TOKEN not in answer_to(prompt := [*stem, *prompt_of(length - len(stem), seed=seed)], max_tokens)
    )
