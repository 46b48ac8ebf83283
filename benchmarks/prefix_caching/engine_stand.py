"""One engine whose block manager and schedule can be exchanged: the variants compared share weights and KV memory.

Prompts are random token ids, the answers have a fixed length, and everything is submitted at once. An engine that has
tiers below the device can be used with and without them.

On a CPU the engine is one thread, and its clock is the CPU time of this process: two threads of torch that wait for
each other on a shared machine measure the neighbours. On an idle machine that is the time on the wall. Where other
threads and processes are part of the measurement, the caller chooses another clock.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
import torch

from benchmarks.model_configs import MODEL_CONFIGS, model_folder
from kvtier import LLM, SamplingParams
from kvtier.engine.answer import Completion
from kvtier.engine.engine import Engine
from kvtier.engine.schedule.block_manager import BlockManagerName, make_block_manager
from kvtier.engine.schedule.scheduler import Scheduler
from kvtier.transfer.transfer import NoTransfer, Transfer

MANAGERS: tuple[BlockManagerName, ...] = ("naive", "disable_prefix_caching", "prefix_caching", "yoco")
SCHEDULES = ("sync", "async-2")

_SETTLE_S = 120.0


def clock_of(device: str) -> Callable[[], float]:
    """The clock of the measured seconds."""
    return time.perf_counter if device == "cuda" else time.process_time


@dataclass(frozen=True)
class Variant:
    """A way to run the engine. Without `has_tiers` it neither loads from nor stores to those below the device."""

    manager: BlockManagerName
    schedule: str = "async-2"
    has_tiers: bool = True
    max_num_batched_tokens: int | None = None

    @property
    def name(self) -> str:
        return f"{self.manager}-{self.schedule}"


VARIANTS = tuple(Variant(manager, schedule) for manager in MANAGERS for schedule in SCHEDULES)


@dataclass(frozen=True)
class Round:
    """The cost of answering all prompts. `shares` are the shares of prompt tokens found in the cache, by tier."""

    seconds: float
    wall_s: float
    schedule_ms: float
    num_steps: int
    shares: Mapping[str, float]
    answers: list[Completion]

    @property
    def qps(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def cached_share(self) -> float:
        return sum(self.shares.values())

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.token_ids for answer in self.answers]


class PromptMaker:
    """New random prompts at every call; two makers give the same sequence."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._dice = np.random.default_rng(seed)

    def make(self, count: int, length: int, hit_rate: float = 0) -> list[list[int]]:
        """`count` prompts whose first `hit_rate` percent are the same, and whose next token is not."""
        tokens = self._dice.integers(self._vocab_size, size=(count, length))
        shared = int(length * hit_rate / 100)
        tokens[:, :shared] = tokens[0, :shared]
        if shared < length and count <= self._vocab_size:
            tokens[:, shared] = self._dice.permutation(self._vocab_size)[:count]
        prompts: list[list[int]] = tokens.tolist()
        return prompts


class Job:
    """Prompts going through an engine step by step. `seconds` is the time of adding them and of all steps."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float], prompts: Sequence[Sequence[int]], num_outputs: int
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._cached_tokens = 0
        self._num_tokens = sum(len(prompt) for prompt in prompts)
        params = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True)
        started_at = clock()
        for number, prompt in enumerate(prompts):
            engine.add(f"prompt-{number}", prompt, params)
        self.seconds = clock() - started_at
        self._num_left = len(prompts)

    @property
    def is_done(self) -> bool:
        return not self._num_left

    @property
    def cached_share(self) -> float:
        return self._cached_tokens / self._num_tokens

    def step(self) -> None:
        started_at = self._clock()
        for request, piece in self._engine.step():
            if piece.completion is not None:
                self._num_left -= 1
                self._cached_tokens += request.cached_tokens
                self._engine.forget(request.group)
        self.seconds += self._clock() - started_at


class EngineStand:
    """An engine with random weights. `use` before `run`."""

    def __init__(
        self,
        shape: str,
        device: str,
        *,
        clock: Callable[[], float] | None = None,
        model_fields: Mapping[str, object] | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are for `EngineConfig`; `model_fields` are fields of config.json in addition to the shape's."""
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(model_folder(shape, **(model_fields or {})))
        self._device = device
        self._clock = clock or clock_of(device)
        if device == "cpu":
            self._stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        self.llm = self._stack.enter_context(LLM(folder, load_format="dummy", device=device, **settings))
        self.vocab_size = self.llm.engine.loaded.config.vocab_size
        self._max_num_batched_tokens = self.llm.engine.config.max_num_batched_tokens

    def use(self, variant: Variant) -> None:
        """Switch to `variant`, with an empty cache on the device. Blocks in the tiers below stay."""
        engine = self.llm.engine
        while engine.has_requests:
            engine.step()
        self.settle()
        if engine.transfer.traffic is not None:
            engine.transfer.traffic.storer.take_copied()  # references held belong to the old manager
        config = msgspec.structs.replace(
            engine.config,
            block_manager=variant.manager,
            schedule=variant.schedule,
            max_num_batched_tokens=variant.max_num_batched_tokens or self._max_num_batched_tokens,
        )
        namespace = engine.loaded.namespace_fields(engine.arena.layout, salt=config.salt).digest()
        blocks = make_block_manager(variant.manager, engine.arena.num_blocks, config.block_size, namespace)
        transfer = engine.transfer
        if isinstance(transfer, Transfer):
            transfer = Transfer(transfer.traffic, engine.arena.num_blocks) if variant.has_tiers else NoTransfer()
        engine.config = config
        engine.scheduler = Scheduler(
            blocks,
            max_num_requests=config.max_num_requests,
            max_num_batched_tokens=config.max_num_batched_tokens,
            transfer=transfer,
        )

    def settle(self) -> None:
        """Wait until the tiers below the device have stored the offered blocks."""
        traffic = self.llm.engine.transfer.traffic
        if traffic is not None and not traffic.settle(_SETTLE_S):
            raise RuntimeError(f"blocks were not stored after {_SETTLE_S:.0f} s")

    def run(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> Round:
        """Answer all prompts, submitted at once, `num_outputs` tokens each. The cache is left from the run before."""
        engine = self.llm.engine
        params = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True)
        gc.collect()
        self.synchronize()
        num_steps, schedule_s = engine.num_steps, engine.schedule_s
        wall_at, started_at = time.perf_counter(), self._clock()
        outputs = self.llm.generate(prompts, params, progress=False)
        seconds, wall_s = self._clock() - started_at, time.perf_counter() - wall_at
        num_steps = engine.num_steps - num_steps
        answers = []
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"a prompt was refused: {output.error}")
            answers += output.outputs
        if any(len(answer.token_ids) != num_outputs for answer in answers):
            raise RuntimeError("an answer is shorter than asked for")
        cached: Counter[str] = Counter()
        for answer in answers:
            cached.update(answer.cached_tokens)
        num_tokens = sum(len(prompt) for prompt in prompts)
        return Round(
            seconds=seconds,
            wall_s=wall_s,
            schedule_ms=1000 * (engine.schedule_s - schedule_s) / num_steps,
            num_steps=num_steps,
            shares={tier: count / num_tokens for tier, count in cached.items()},
            answers=answers,
        )

    def start(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> Job:
        """Take in all prompts; the job's `step` does the work."""
        return Job(self.llm.engine, self._clock, prompts, num_outputs)

    def settings(self) -> dict[str, object]:
        engine = self.llm.engine
        config = engine.config
        return {
            "kv_blocks": engine.arena.num_blocks,
            "block_size": config.block_size,
            "dtype": engine.loaded.dtype,
            "weights_bytes": engine.loaded.weights_bytes,
            "max_num_requests": config.max_num_requests,
            "max_num_batched_tokens": config.max_num_batched_tokens,
        }

    def synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self._stack.close()
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def kv_bytes_of(shape: str, num_tokens: int, itemsize: int) -> int:
    """The size of `num_tokens` of KV in blocks of 16, for `kv_cache_space`."""
    config: Any = MODEL_CONFIGS[shape]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * itemsize
    return int(-(-num_tokens // 16) * 16 * per_token)
