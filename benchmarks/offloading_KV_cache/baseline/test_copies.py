"""Copies beside compute: 512 scattered blocks through the engine's copier, idle and while a prompt is computed.

    python -m benchmarks.offloading_KV_cache.baseline.test_copies [--quick] [--json FILE]

The blocks have the layout of the engine's KV and lie in a separate arena on the same device, so that only the traffic
disturbs prompts; the host's memory is registered. Idle, the copier takes turns with one large copy of pinned memory,
which is the limit. Then prompts are computed (one output token, no cache), in turns: alone, while blocks are loaded
continuously, while they are stored. A GPU's own clock times the copies, from before the first is handed over to the end
of the last. `prefill_loss` is the share of the prefill's speed that is lost, in the worse direction.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import Result, console, print_table
from benchmarks.offloading_KV_cache.baseline.test_swap import Stand
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Variant
from benchmarks.prefix_caching.options import conclude, is_h200, make_parser, parse
from benchmarks.tier_stand import chosen, kv_bytes, settings_of
from kvtier.transfer.copier import Copier, Copies
from kvtier.transfer.copiers.cuda_copier import NUM_GROUPS, CudaCopier

H200_BARS = {
    "copy_in_gbs": ">= 51",
    "copy_out_gbs": ">= 51",
    "copy_in_loaded_gbs": ">= 51",
    "copy_out_loaded_gbs": ">= 51",
    "prefill_loss": "<= 0.03",
}
DIRECTIONS = ("in", "out")
ALONE = "alone"
COMPUTING = Variant("naive", has_tiers=False)


@dataclass(frozen=True)
class Size:
    """How much is measured. `passes` counts the idle passes over all blocks."""

    blocks: int
    passes: int
    prompts: int
    input_tokens: int
    repeats: int
    max_num_batched_tokens: int


class Traffic:
    """Copies all blocks, over and over, in one direction at a time. `seconds` are the times of the passes."""

    def __init__(self, stand: Stand, copier: Copier) -> None:
        self._stand = stand
        self._copier = copier
        self._memory = stand.memories[0]
        self._after = copier.mark()
        """No computation has to be waited for."""

    def copy(self, direction: str) -> float:
        """One pass, and its seconds by the device's clock."""
        copier = self._copier
        if not isinstance(copier, CudaCopier):
            started_at = time.perf_counter()
            self._begin(direction).wait()
            return time.perf_counter() - started_at
        stream = (copier._loads if direction == "in" else copier._stores).stream
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True, blocking=True)
        begin.record(stream)
        transfer = self._begin(direction)
        end.record(stream)
        transfer.wait()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    @contextlib.contextmanager
    def running(self, direction: str) -> Iterator[list[float]]:
        """Copy continuously, from before the body to its end. The list has the passes within the body."""
        seconds: list[float] = []
        begun, stop = threading.Event(), threading.Event()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                while not stop.is_set():
                    took = self.copy(direction)
                    if begun.is_set() and not stop.is_set():
                        seconds.append(took)
                    begun.set()
            except BaseException as error:
                failures.append(error)
                begun.set()

        thread = threading.Thread(target=work, name="benchmark-copies")
        thread.start()
        try:
            begun.wait()
            yield seconds
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]

    def prepare(self, direction: str) -> None:
        self._stand.clear() if direction == "in" else self._stand.next_bytes()

    def check(self, direction: str) -> None:
        """Check the copied bytes on the other side."""
        if direction == "in":
            self._stand.expect_loaded()
        else:
            self._stand.expect_stored(self._copier, self._memory)

    def _begin(self, direction: str) -> Copies:
        block_ids, memory = self._stand.block_ids, self._memory
        if direction == "in":
            return self._copier.load(memory.arena, memory.sources, block_ids, self._after)
        return self._copier.store(block_ids, memory.arena, memory.targets, self._after)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--blocks", type=int, help="how many blocks a pass copies")
    parser.add_argument("--passes", type=int, help="how many passes are timed while nothing is computed")
    parser.add_argument("--input-tokens", type=int, help="how long a prompt is")
    arguments = parse(parser, argv)
    size = _size(arguments)
    settings = {**settings_of(arguments, size), "layer_groups_in": NUM_GROUPS}
    result = Result("offloading_KV_cache.baseline.test_copies", settings)
    bars = H200_BARS if is_h200(arguments.device) else {}
    return conclude(result, arguments, bars, lambda: measure(arguments, size, result))


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            EngineStand(
                arguments.model_shape,
                arguments.device,
                clock=time.perf_counter,
                kv_cache_space=kv_bytes(arguments, 2 * size.prompts * (size.input_tokens + 32)),
                max_model_len=size.input_tokens + 32,
                max_num_requests=size.prompts,
                max_num_batched_tokens=size.max_num_batched_tokens,
            )
        )
        result.settings = {**result.settings, **engine.settings()}
        layout, device = engine.llm.engine.arena.layout, torch.device(arguments.device)
        stand = Stand(layout, stack, device, num_blocks=size.blocks, has_server=False)
        traffic = Traffic(stand, stack.enter_context(stand.copier(NUM_GROUPS)))
        measure_idle(stand, traffic, size, result)
        measure_beside(engine, stand, traffic, size, result)
    print_table(f"{size.blocks} blocks of {layout.block_bytes} bytes, medians", result.rows)


def measure_idle(stand: Stand, traffic: Traffic, size: Size, result: Result) -> None:
    for direction in DIRECTIONS:
        seconds: dict[str, list[float]] = {"copier": [], "one large copy, pinned": []}
        for number in range(size.passes + 2):
            traffic.prepare(direction)
            took = {"copier": traffic.copy(direction), "one large copy, pinned": stand.move(direction)}
            if number == 0:
                traffic.check(direction)
            if number >= 2:
                for name, value in took.items():
                    seconds[name].append(value)
        for name, values in seconds.items():
            gbs = stand.nbytes / statistics.median(values) / 1e9
            result.rows.append({"copies": direction, "beside": "nothing", "what": name, "GB/s": round(gbs, 2)})
            if name == "copier":
                result.figures[f"copy_{direction}_gbs"] = gbs
            console.print(f"{direction}, idle, {name}: {gbs:.1f} GB/s")


def measure_beside(engine: EngineStand, stand: Stand, traffic: Traffic, size: Size, result: Result) -> None:
    maker = PromptMaker(engine.vocab_size)
    engine.use(COMPUTING)
    for _ in range(2):
        engine.run(maker.make(size.prompts, size.input_tokens), 1)
    prefill_s: dict[str, list[float]] = {name: [] for name in (ALONE, *DIRECTIONS)}
    pass_s: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    for number in range(size.repeats):
        names = list(prefill_s)
        for name in names if number % 2 == 0 else reversed(names):
            prompts = maker.make(size.prompts, size.input_tokens)
            if name == ALONE:
                prefill_s[name].append(engine.run(prompts, 1).seconds)
                continue
            traffic.prepare(name)
            with traffic.running(name) as seconds:
                prefill_s[name].append(engine.run(prompts, 1).seconds)
            if not seconds:
                raise RuntimeError("the prompts were computed before one pass of the copies was over")
            pass_s[name] += seconds
            traffic.check(name)
    num_tokens = size.prompts * size.input_tokens
    for name, values in prefill_s.items():
        row: dict[str, object] = {"copies": name, "beside": "a prefill"}
        row["prefill, tokens/s"] = round(num_tokens / statistics.median(values))
        if name != ALONE:
            ratios = [alone / beside for alone, beside in zip(prefill_s[ALONE], values, strict=True)]
            loss = 1 - statistics.median(ratios)
            gbs = stand.nbytes / statistics.median(pass_s[name]) / 1e9
            row |= {
                "what": "copier",
                "GB/s": round(gbs, 2),
                "passes": len(pass_s[name]),
                "prefill loses": round(loss, 4),
            }
            result.figures[f"copy_{name}_loaded_gbs"] = gbs
            result.figures["prefill_loss"] = max(loss, result.figures.get("prefill_loss", loss))
        console.print(", ".join(f"{key} {value}" for key, value in row.items()))
        result.rows.append(row)


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            blocks=512,
            passes=10 if quick else 20,
            prompts=4,
            input_tokens=8192,
            repeats=5 if quick else 9,
            max_num_batched_tokens=8192,
        )
    else:
        size = Size(
            blocks=512,
            passes=5,
            prompts=2,
            input_tokens=512 if quick else 1024,
            repeats=3,
            max_num_batched_tokens=512,
        )
    names = ("blocks", "passes", "prompts", "input_tokens", "repeats", "max_num_batched_tokens")
    return Size(**{**vars(size), **chosen(arguments, *names)})


if __name__ == "__main__":
    sys.exit(main())
