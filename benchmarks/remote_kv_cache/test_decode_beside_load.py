"""Decoding beside a load from disk: does the time between tokens grow?

    python -m benchmarks.remote_kv_cache.test_decode_beside_load [--quick] [--json FILE] [--folder DIR]

16 requests decode, each behind 1024 tokens. While each of them decodes 512 tokens, prompts of 30,000 tokens are loaded
from a cache server's disk, with one output token, one after the other: a load is always in progress. This takes turns
with the same without loads. The times are those between two tokens of one request. `decode_p99_growth` is
the median over the turns of the 99th percentile with loads over the one without; `decode_p99_growth_copies` leaves out
the two steps of each load that do more than copy: the one that admits the prompt, and the one that computes its last
tokens. The decoding requests were stored before, so that little is stored meanwhile. Less on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness import Result, console, print_table
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Variant
from benchmarks.prefix_caching.options import conclude, is_h200, parse
from benchmarks.tier_stand import (
    DEVICE_OFF,
    chosen,
    full_share,
    kv_bytes,
    make_tier_parser,
    median_ratio,
    settings_of,
    warm_up,
)
from kvtier import SamplingParams
from kvtier.engine.engine import StepOutput
from kvtier.engine.schedule.request import Request
from kvtier.testing.servers import cache_server

GPU_SHAPE = "Qwen2.5-7B"
FIGURE = "decode_p99_growth"
H200_BARS = {FIGURE: "<= 1.05"}
WITHOUT, BESIDE = "without", "beside loads"
LOADING = Variant(DEVICE_OFF)
_NUM_LONG = 2
"""Prompts that are loaded in turns: the next must not find the last one's blocks still in flight."""
_LEAST_LOADED = 0.8


@dataclass(frozen=True)
class Size:
    """How much is measured. After `lead` tokens of each request, `window` tokens are timed."""

    decoding: int
    context_tokens: int
    long_tokens: int
    lead: int
    window: int
    repeats: int
    max_num_batched_tokens: int


@dataclass
class Gaps:
    """Seconds between tokens of one turn, those of steps that only decoded, and the number of finished loads."""

    all_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    loads_s: list[float] = field(default_factory=list)

    def percentile_ms(self, percent: float) -> float:
        return 1000 * float(np.percentile(self.all_s, percent))

    def plain_percentile_ms(self, percent: float) -> float:
        return 1000 * float(np.percentile(self.plain_s, percent))


class Decoding:
    """Requests that decode, one turn at a time, on one engine."""

    def __init__(self, stand: EngineStand, prompts: Sequence[list[int]], long: Sequence[list[int]], size: Size) -> None:
        self._stand = stand
        self._prompts = prompts
        self._long = itertools.cycle(long)
        self._size = size
        self._numbers = itertools.count()
        self._last_at: dict[str, float] = {}
        self._num_tokens: dict[str, int] = {}

    def turn(self, *, has_loads: bool) -> Gaps:
        """All requests from the start; the times are those of the window."""
        size, engine = self._size, self._stand.llm.engine
        self._stand.use(LOADING)
        gc.collect()
        self._last_at, self._num_tokens = {}, {}
        names = [self._add(prompt, size.lead + size.window + size.context_tokens) for prompt in self._prompts]
        while len(self._num_tokens) < len(names) or min(self._num_tokens.values()) < size.lead:
            self._take(engine.step(), None, is_plain=True)
        found = Gaps()
        end = max(self._num_tokens.values()) + size.window
        long_name, begun_at = "", 0.0
        while max(self._num_tokens.values()) < end:
            is_plain = True
            if has_loads and not long_name:
                begun_at = time.perf_counter()
                long_name = self._add(next(self._long), 1)
                is_plain = False
            outputs = engine.step()
            ended = next((request for request, _ in outputs if request.id == long_name), None)
            self._take(outputs, found, is_plain=is_plain and ended is None)
            if ended is not None:
                found.loads_s.append(time.perf_counter() - begun_at)
                self._check(ended)
                engine.forget(long_name)
                long_name = ""
        for name in (*names, long_name):
            engine.abort(name)
            engine.forget(name)
        if has_loads and not found.loads_s:
            raise RuntimeError("no load ended while requests were decoding: the window is too short")
        return found

    def _add(self, prompt: list[int], num_outputs: int) -> str:
        name = f"turn-{next(self._numbers)}"
        params = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True)
        self._stand.llm.engine.add(name, prompt, params)
        return name

    def _take(self, outputs: list[StepOutput], into: Gaps | None, *, is_plain: bool) -> None:
        """Note the times of decoded tokens."""
        now = time.perf_counter()
        for request, piece in outputs:
            name = request.id
            if request.prompt_tokens != self._size.context_tokens:
                continue
            if into is not None and name in self._last_at:
                into.all_s.append(now - self._last_at[name])
                if is_plain:
                    into.plain_s.append(now - self._last_at[name])
            self._last_at[name] = now
            self._num_tokens[name] = self._num_tokens.get(name, 0) + len(piece.token_ids)

    def _check(self, request: Request) -> None:
        loaded_tokens = request.prefetch.history.loaded_tokens
        loaded = loaded_tokens.get("disk", 0)
        if loaded < _LEAST_LOADED * full_share(self._size.long_tokens) * self._size.long_tokens:
            raise RuntimeError(f"only {loaded} tokens of the long prompt came from disk: {loaded_tokens}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_tier_parser(__doc__ or "", GPU_SHAPE)
    parser.add_argument("--long-tokens", type=int, help="how long the prompt is that is loaded")
    parser.add_argument("--window", type=int, help="how many tokens of each request are timed in a turn")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the disk's files go")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("remote_kv_cache.test_decode_beside_load", settings_of(arguments, size))
    bars = H200_BARS if is_h200(arguments.device) else {}
    return conclude(result, arguments, bars, lambda: measure(arguments, size, result))


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    context_tokens = size.decoding * (2 * size.context_tokens + size.lead + size.window + 32)
    run_tokens = context_tokens + _NUM_LONG * (size.long_tokens + 32)
    nbytes = kv_bytes(arguments, run_tokens)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.folder))
        options = ("--folder", folder, "--disk", str(4 * nbytes + (1 << 26)), "--disk-only")
        server = stack.enter_context(cache_server("--max-leased", str(nbytes), *options, memory=str(nbytes)))
        stand = stack.enter_context(
            EngineStand(
                arguments.model_shape,
                arguments.device,
                clock=time.perf_counter,
                kv_cache_space=kv_bytes(arguments, run_tokens),
                max_model_len=max(size.long_tokens, 2 * size.context_tokens + size.lead + size.window) + 32,
                max_num_requests=size.decoding + 2,
                max_num_batched_tokens=size.max_num_batched_tokens,
                cache_server=server.unix,
                always_load=True,
            )
        )
        result.settings = {**result.settings, **stand.settings()}
        maker = PromptMaker(stand.vocab_size)
        warm_up(stand, maker, 2, size.context_tokens)
        prompts, long = maker.make(size.decoding, size.context_tokens), maker.make(_NUM_LONG, size.long_tokens)
        stand.use(LOADING)
        stand.run(prompts, size.lead + size.window + 16)
        stand.run(long, 1)
        stand.settle()
        turns = _take_turns(Decoding(stand, prompts, long, size), size)
    _report(turns, size, result)


def _take_turns(decoding: Decoding, size: Size) -> dict[str, list[Gaps]]:
    turns: dict[str, list[Gaps]] = {WITHOUT: [], BESIDE: []}
    for repeat in range(size.repeats + 1):
        for name in (WITHOUT, BESIDE) if repeat % 2 == 0 else (BESIDE, WITHOUT):
            done = decoding.turn(has_loads=name == BESIDE)
            console.print(
                f"turn {repeat}, {name}: p50 {done.percentile_ms(50):.2f} ms, p99 {done.percentile_ms(99):.2f} ms, "
                f"{len(done.loads_s)} loads"
            )
            if repeat:
                turns[name].append(done)
    return turns


def _report(turns: dict[str, list[Gaps]], size: Size, result: Result) -> None:
    for name, done in turns.items():
        row: dict[str, object] = {"decoding": name}
        for percent in (50, 90, 99, 99.9):
            values = [one.percentile_ms(percent) for one in done]
            row[f"p{percent:g} ms"] = round(statistics.median(values), 3)
        row["most ms"] = round(max(max(one.all_s) for one in done) * 1000, 3)
        row["loads"] = sum(len(one.loads_s) for one in done)
        if row["loads"]:
            row["s a load"] = round(statistics.median(itertools.chain(*(one.loads_s for one in done))), 3)
        result.rows.append(row)
    result.figures["decode_p99_growth_copies"] = median_ratio(
        [one.plain_percentile_ms(99) for one in turns[BESIDE]],
        [one.plain_percentile_ms(99) for one in turns[WITHOUT]],
    )
    for percent, figure in ((99, FIGURE), (50, "decode_p50_growth")):
        result.figures[figure] = median_ratio(
            [one.percentile_ms(percent) for one in turns[BESIDE]],
            [one.percentile_ms(percent) for one in turns[WITHOUT]],
        )
    print_table(
        f"times between tokens of {size.decoding} requests, medians of {size.repeats} turns, "
        f"loads of {size.long_tokens} tokens from disk",
        result.rows,
    )


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            decoding=16,
            context_tokens=1024,
            long_tokens=30000,
            lead=32,
            window=384 if quick else 512,
            repeats=5 if quick else 9,
            max_num_batched_tokens=8192,
        )
    else:
        size = Size(
            decoding=4,
            context_tokens=128,
            long_tokens=1024 if quick else 2048,
            lead=4,
            window=64,
            repeats=3,
            max_num_batched_tokens=512,
        )
    given = chosen(arguments, "long_tokens", "window", "repeats", "max_num_batched_tokens")
    renamed = {"prompts": "decoding", "input_tokens": "context_tokens"}
    given |= {renamed[name]: value for name, value in chosen(arguments, *renamed).items()}
    return Size(**{**vars(size), **given})


if __name__ == "__main__":
    sys.exit(main())
