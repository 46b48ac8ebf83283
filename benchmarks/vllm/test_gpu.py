"""The plug-in inside real vLLM on a GPU: its hits beside vLLM's own, restarts, the disk, and what it costs.

    python -m benchmarks.vllm.test_gpu [--parts hits restart overhead decode starts failures hybrid] [--json FILE]

Engines run in processes of their own, as `vllm serve` has them, with random weights of Qwen2.5-7B's shape in bfloat16.
Starting one takes most of a minute, so `hits`, `overhead` and `decode` have the same three if they follow each other.

- `hits`: no connector, vLLM's own offloading to host memory, and kvtier, in turns: time to first token of 30,000
  tokens, cold, from vLLM's own prefix cache, and after that was emptied; 10 prompts of 10,240 at once, 2 and 32 out.
- `restart`: a new engine on the server's memory; then both are new, and each round reads the server's disk, beside
  direct reads of a file on the same filesystem.
- `overhead`: new prompts, with the plug-in and without, in turns, while everything is saved.
- `decode`: times between tokens of running answers while other prompts arrive that are loaded from the server, beside
  the same with vLLM's own hits.
- `starts`: ten starts of a server with 64 GiB and an engine that captures its graphs while that is registered.
- `failures`: the server is killed, or hangs, during loads and during saves.
- `hybrid`: a model of gated DeltaNet and attention (Qwen3.5's shape): hits after a restart, and their tokens.

`--small` is for trying this program on a CPU: its figures are meaningless.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import vllm

from benchmarks.harness import BlockMemory, Result, console, finish, print_table
from benchmarks.persistence_kv_cache.test_disk import RawFile
from benchmarks.vllm.gpu_models import DENSE, FEW_LAYERS, HYBRID, SMALL, kv_bytes_per_token, vocab_size, write_model
from benchmarks.vllm.quiet import wait_until_quiet
from benchmarks.vllm.stand import Answer, VllmEngine, engine, kvtier_transfer
from kvtier.testing.servers import ServerProcess, cache_server

PLAIN, NATIVE, KVTIER = "no connector", "own offloading", "kvtier"
PARTS = ("hits", "overhead", "decode", "restart", "starts", "failures", "hybrid")
SIDE_BY_SIDE = ("hits", "overhead", "decode")
BARS = {
    "hits": {
        "vllm_own_hit_over_plain": "<= 1.05",
        "vllm_ttft_30k_kvtier_over_native": "<= 0.5",
        "vllm_host_hit_n2": ">= 70",
        "vllm_same_tokens": ">= 1",
    },
    "restart": {"vllm_restart_ttft_30k_ms": "<= 50", "vllm_disk_of_raw": ">= 0.85"},
    "overhead": {
        "vllm_overhead_prefill": ">= 0.99",
        "vllm_overhead_mixed": ">= 0.99",
        "vllm_overhead_decode": ">= 0.99",
    },
    "decode": {"vllm_decode_p99_growth": "<= 1.05"},
    "starts": {"vllm_starts": ">= 10"},
    "failures": {"vllm_finished_beside_failures": ">= 1"},
    "hybrid": {"vllm_hybrid_restart_over_cold": "<= 0.5", "vllm_hybrid_same_tokens": ">= 1"},
}
OWN_HITS = 8
"""Repeats of each prompt: times spread by a third, and a difference of a twentieth should show."""
RAW_THREADS = (4, 16)
RAW_BLOCK_BYTES = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Size:
    """The size of the benchmark. `mid` prompts are sent together, and so are `short` ones."""

    shape: str
    shape_for_starts: str
    long_tokens: int
    mid_tokens: int
    short_tokens: int
    num_mid: int
    num_short: int
    page_tokens: int
    dtype: str
    repeats: int
    server_memory: str
    server_disk: str
    native_gib: float | None
    """None on CPUs, where vLLM has no offloading."""
    num_starts: int
    starting_memory: str
    arguments: dict[str, Any]


WHOLE = Size(
    shape=DENSE,
    shape_for_starts=FEW_LAYERS,
    long_tokens=30_000,
    mid_tokens=10_240,
    short_tokens=1_000,
    num_mid=10,
    num_short=100,
    page_tokens=16,
    dtype="bfloat16",
    repeats=5,
    server_memory="32GiB",
    server_disk="28GiB",
    native_gib=32.0,
    num_starts=10,
    starting_memory="64GiB",
    arguments={"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": 16 * GIB, "enforce_eager": False},
)
TINY = Size(
    shape=SMALL,
    shape_for_starts=SMALL,
    long_tokens=1_500,
    mid_tokens=400,
    short_tokens=100,
    num_mid=4,
    num_short=6,
    page_tokens=32,
    dtype="float32",
    repeats=2,
    server_memory="1GiB",
    server_disk="2GiB",
    native_gib=None,
    num_starts=2,
    starting_memory="1GiB",
    arguments={},
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    size = TINY if arguments.small else WHOLE
    if arguments.repeats is not None:
        size = replace(size, repeats=arguments.repeats)
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="kvtier-vllm-gpu-"))
    settings = {**_settings(size, arguments.parts), "whole_prompts": arguments.whole_prompts}
    result = Result("vllm.test_gpu", settings)
    bars = {name: bar for part in arguments.parts for name, bar in BARS[part].items()}
    stand = GpuStand(size, folder, result, whole_prompts=arguments.whole_prompts)
    try:
        for part in arguments.parts:
            started_at = time.monotonic()
            console.rule(part)
            if part not in SIDE_BY_SIDE:
                stand.close()
            try:
                PART[part](stand)
            except Exception:  # without its figures, the others are still useful
                console.print_exception()
            result.write(arguments.json)
            console.print(f"{part}: {time.monotonic() - started_at:.0f} s")
    finally:
        stand.close()
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print_table(size.shape, result.rows)
    return finish(result, bars, arguments.json)


def _settings(size: Size, parts: Sequence[str]) -> dict[str, object]:
    return {
        "shape": size.shape,
        "device": _device_name(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "dtype": size.dtype,
        "ttft_tokens": size.long_tokens,
        "repeats": size.repeats,
        "engine_in_its_own_process": True,
        "parts": list(parts),
    }


def _device_name() -> str:
    """Found without CUDA: after using it, a process cannot fork its engines, and starting them anew is slow."""
    try:
        names = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return "cpu"
    return names.stdout.strip() or "cpu"


# --- what the parts share --------------------------------------------------------------------------------------------


class GpuStand:
    """Models, servers and engines of one size, and where their results go."""

    def __init__(self, size: Size, folder: Path, result: Result, *, whole_prompts: bool = False) -> None:
        self.size = size
        self.whole_prompts = whole_prompts
        self.folder = folder
        self.result = result
        self._opened = contextlib.ExitStack()
        self._engines: dict[str, VllmEngine] = {}

    def side_by_side(self) -> dict[str, VllmEngine]:
        """Engines without a connector, with vLLM's own offloading if it has that here, and with kvtier; open until
        `close`.
        """
        if not self._engines:
            native_gib = self.size.native_gib
            server = self._opened.enter_context(self.server())
            self._engines[PLAIN] = self._opened.enter_context(self.engine())
            if native_gib is not None:
                native = self.engine(kv_offloading_size=native_gib, kv_offloading_backend="native")
                self._engines[NATIVE] = self._opened.enter_context(native)
            self._engines[KVTIER] = self._opened.enter_context(self.engine(server))
        return self._engines

    def close(self) -> None:
        self._engines.clear()
        self._opened.close()

    def add(self, **row: object) -> None:
        console.print(", ".join(f"{name} {value}" for name, value in row.items()))
        self.result.rows.append(row)

    def figure(self, name: str, value: float) -> None:
        self.result.figures[name] = value

    @contextlib.contextmanager
    def server(self, *options: str, memory: str | None = None) -> Iterator[ServerProcess]:
        with cache_server(*options, memory=memory or self.size.server_memory) as server:
            yield server

    def disk_options(self) -> tuple[str, ...]:
        return ("--folder", str(self.folder / "blocks"), "--disk", self.size.server_disk)

    @contextlib.contextmanager
    def engine(
        self,
        server: ServerProcess | None = None,
        *,
        shape: str | None = None,
        connector: tuple[str, str] = ("KvtierConnector", "kvtier.plugins.vllm"),
        **overrides: Any,
    ) -> Iterator[VllmEngine]:
        """With kvtier if there is a server: the `connector` of this class and module."""
        shape = shape or self.size.shape
        model = write_model(shape, self.folder / shape.replace(" ", "-"))
        always_load = overrides.pop("always_load", False)
        transfer = None
        if server is not None:
            transfer = kvtier_transfer(server.unix, connector=connector[0], module=connector[1])
            transfer["kv_connector_extra_config"] |= {"always_load": always_load, "whole_prompts": self.whole_prompts}
        settings = {
            "dtype": self.size.dtype,
            "block_size": self.size.page_tokens,
            "max_model_len": self.size.long_tokens + 2048,
            "max_num_seqs": 64,
            **self.size.arguments,
            **overrides,
        }
        with engine(model, transfer, **settings) as one:
            console.print(f"  an engine started in {one.start_s:.0f} s")
            self._warm_up(one)
            yield one

    def _warm_up(self, one: VllmEngine) -> None:
        """Warm up shapes of prefills and decodes, with prompts that are not used again."""
        size = self.size
        tag = time.time_ns()
        for length in (size.short_tokens, size.mid_tokens):
            one.ask_all([self.prompt(length, tag, length, number) for number in range(4)], num_tokens=8)
        one.ask(self.prompt(size.long_tokens, tag), num_tokens=4)
        one.forget_prefixes()

    def prompt(self, count: int, *name: object) -> list[int]:
        """Token ids, which differ from the first on for different names."""
        dice = random.Random(repr(name))
        return dice.choices(range(10, vocab_size(self.size.shape)), k=count)

    def long_prompt(self, *name: object) -> list[int]:
        return self.prompt(self.size.long_tokens, "long", *name)

    def mid_prompts(self, *name: object) -> list[list[int]]:
        return [self.prompt(self.size.mid_tokens, "mid", *name, number) for number in range(self.size.num_mid)]

    def rate(self, one: VllmEngine, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[Answer]]:
        """Requests per second."""
        answers, seconds = one.ask_all(prompts, num_tokens=num_tokens)
        return len(prompts) / seconds, answers


def _turns(repeat: int, names: Sequence[str]) -> list[str]:
    shift = repeat % len(names)
    return [*names[shift:], *names[:shift]]


def _same(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The share of answers whose tokens are equal."""
    return statistics.fmean(one.tokens == other.tokens for one, other in zip(answers, others, strict=True))


def _expect_cached(answers: Sequence[Answer], share: float, what: str) -> None:
    cached = [answer.num_cached for answer in answers]
    if share == 0.0 and any(cached):
        raise AssertionError(f"{what}: a prompt that was never asked was found in a cache")
    if share and min(cached) < share:
        raise AssertionError(f"{what}: {min(cached)} tokens came from a cache, not {share:.0f}")


# --- hits ------------------------------------------------------------------------------------------------------------


def measure_hits(stand: GpuStand) -> None:
    engines = stand.side_by_side()
    _measure_first_tokens(stand, engines)
    for num_tokens in (2, 32):
        _measure_together(stand, engines, num_tokens)


def _measure_first_tokens(stand: GpuStand, engines: dict[str, VllmEngine]) -> None:
    size = stand.size
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    same: list[float] = []
    for repeat in range(size.repeats):
        prompt = stand.long_prompt(repeat)
        own: dict[str, Answer] = {}
        for name in _turns(repeat, list(engines)):
            one = engines[name]
            cold = one.ask(prompt, num_tokens=16)
            if name != KVTIER or repeat:
                _expect_cached([cold], 0.0, f"{name}, cold")
            seconds[name, "cold"].append(cold.first_token_s)
            wait_until_quiet()
            for _ in range(OWN_HITS):
                own[name] = one.ask(prompt, num_tokens=16)
                seconds[name, "own"].append(own[name].first_token_s)
        for name in _turns(repeat, [name for name in engines if name != PLAIN]):
            for _ in range(3):
                wait_until_quiet()
                engines[name].forget_prefixes()
                loaded = engines[name].ask(prompt, num_tokens=16)
                _expect_cached([loaded], size.long_tokens - 2 * size.page_tokens, f"{name}, after a reset")
                seconds[name, "reset"].append(loaded.first_token_s)
                if name == KVTIER:
                    same.append(loaded.tokens == own[name].tokens)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    for (name, state), value in medians.items():
        least = min(seconds[name, state])
        stand.add(what="first token", engine=name, state=state, ms=round(1e3 * value, 1), least=round(1e3 * least, 1))
    stand.figure("vllm_own_hit_over_plain", medians[KVTIER, "own"] / medians[PLAIN, "own"])
    if NATIVE in engines:
        stand.figure("vllm_ttft_30k_kvtier_over_native", medians[KVTIER, "reset"] / medians[NATIVE, "reset"])
    stand.figure("vllm_ttft_30k_reset_ms", 1e3 * medians[KVTIER, "reset"])
    stand.figure("vllm_same_tokens", statistics.fmean(same))


def _measure_together(stand: GpuStand, engines: dict[str, VllmEngine], num_tokens: int) -> None:
    size = stand.size
    prompts = stand.mid_prompts(num_tokens)
    own_answers: dict[str, list[Answer]] = {}
    for name, one in engines.items():
        rate, answers = stand.rate(one, prompts, num_tokens)
        _expect_cached(answers, 0.0, f"{name}, cold")
        stand.add(what=f"{size.num_mid} at once, {num_tokens} out", engine=name, state="cold", qps=round(rate, 2))
        wait_until_quiet()
    rates: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    same: defaultdict[str, list[float]] = defaultdict(list)
    for repeat in range(size.repeats):
        for name in _turns(repeat, list(engines)):
            rate, own_answers[name] = stand.rate(engines[name], prompts, num_tokens)
            rates[name, "own"].append(rate)
        for name in _turns(repeat, [name for name in engines if name != PLAIN]):
            wait_until_quiet()
            engines[name].forget_prefixes()
            rate, answers = stand.rate(engines[name], prompts, num_tokens)
            _expect_cached(answers, size.mid_tokens - 2 * size.page_tokens, f"{name}, after a reset")
            rates[name, "reset"].append(rate)
            same[name].append(_same(answers, own_answers[name]))
    for (name, state), values in rates.items():
        row = {"what": f"{size.num_mid} at once, {num_tokens} out", "engine": name, "state": state}
        equal = round(statistics.fmean(same[name]), 3) if state == "reset" else None
        stand.add(**row, qps=round(statistics.median(values), 1), most=round(max(values), 1), same_as_own=equal)
    stand.figure(f"vllm_host_hit_n{num_tokens}", statistics.median(rates[KVTIER, "reset"]))


# --- restarts --------------------------------------------------------------------------------------------------------


def measure_restart(stand: GpuStand) -> None:
    size = stand.size
    prompts, together = [stand.long_prompt("restart", number) for number in range(size.repeats)], stand.mid_prompts("r")
    with stand.server(*stand.disk_options()) as server:
        with stand.engine(server) as one:
            cold = [one.ask(prompt, num_tokens=16) for prompt in prompts]
            stand.rate(one, together, 2)
            wait_until_quiet()
        with stand.engine(server) as one:
            wait_until_quiet()
            loaded = [one.ask(prompt, num_tokens=16) for prompt in prompts]
            _expect_cached(loaded, size.long_tokens - 2 * size.page_tokens, "a new engine")
            rate, answers = stand.rate(one, together, 2)
            _expect_cached(answers, size.mid_tokens - 2 * size.page_tokens, "a new engine")
        wait_until_quiet()
    _add_first_tokens(stand, "cold", cold)
    _add_first_tokens(stand, "new engine, from the server's memory", loaded)
    stand.add(what=f"{size.num_mid} at once, 2 out", engine=KVTIER, state="new engine", qps=round(rate, 1))
    stand.figure("vllm_restart_ttft_30k_ms", 1e3 * statistics.median(answer.first_token_s for answer in loaded))
    _measure_disk(stand, together, prompts)


def _measure_disk(stand: GpuStand, together: list[list[int]], prompts: list[list[int]]) -> None:
    """Server and engine are new, and the server keeps nothing in memory: every round reads."""
    size = stand.size
    pages = size.num_mid * ((size.mid_tokens - 1) // size.page_tokens)
    nbytes = pages * size.page_tokens * kv_bytes_per_token(size.shape)
    source = BlockMemory(-(-nbytes // RAW_BLOCK_BYTES), RAW_BLOCK_BYTES, seed=3)
    target = BlockMemory(len(source.blocks), RAW_BLOCK_BYTES)
    read_gbs, raw_gbs = [], []
    with (
        stand.server(*stand.disk_options(), "--disk-only") as server,
        stand.engine(server, always_load=True) as one,
        RawFile(stand.folder / "raw", source, target) as raw,
    ):
        for _ in range(size.repeats):
            raw_gbs.append(max(source.nbytes / raw.read(threads) / 1e9 for threads in RAW_THREADS))
            wait_until_quiet()
            one.forget_prefixes()
            rate, answers = stand.rate(one, together, 2)
            _expect_cached(answers, size.mid_tokens - 2 * size.page_tokens, "from disk")
            read_gbs.append(nbytes * rate / size.num_mid / 1e9)
        answers = [one.ask(prompt, num_tokens=16) for prompt in prompts]
        _expect_cached(answers, size.long_tokens - 2 * size.page_tokens, "from disk")
    (stand.folder / "raw").unlink()
    _add_first_tokens(stand, "both new, from disk", answers)
    stand.add(what="disk", engine=KVTIER, state="GB/s, raw", gbs=_shown(read_gbs), raw=_shown(raw_gbs))
    ratios = [ours / raw for ours, raw in zip(read_gbs, raw_gbs, strict=True)]
    stand.figure("vllm_disk_of_raw", statistics.median(ratios))


def _shown(rates: Sequence[float]) -> list[float]:
    return [round(rate, 2) for rate in rates]


def _add_first_tokens(stand: GpuStand, state: str, answers: Sequence[Answer]) -> None:
    seconds = [answer.first_token_s for answer in answers]
    middle, least = 1e3 * statistics.median(seconds), 1e3 * min(seconds)
    stand.add(what="first token", engine=KVTIER, state=state, ms=round(middle, 1), least=round(least, 1))


# --- what it costs ---------------------------------------------------------------------------------------------------


def measure_overhead(stand: GpuStand) -> None:
    size = stand.size
    loads = {
        "prefill": (2, size.num_mid, size.mid_tokens),
        "mixed": (24, size.num_short, size.short_tokens),
        "decode": (128, 32, size.short_tokens),
    }
    engines = {name: stand.side_by_side()[name] for name in (PLAIN, KVTIER)}
    for load, (num_tokens, count, length) in loads.items():
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for repeat in range(size.repeats + 1):  # the first is for warming up
            prompts = [stand.prompt(length, "new", load, repeat, number) for number in range(count)]
            for name in _turns(repeat, list(engines)):
                wait_until_quiet()
                rate, answers = stand.rate(engines[name], prompts, num_tokens)
                _expect_cached(answers, 0.0, f"{name}, {load}")
                if repeat:
                    rates[name].append(rate)
        ratios = [ours / others for ours, others in zip(rates[KVTIER], rates[PLAIN], strict=True)]
        stand.add(what="overhead", state=load, ratios=[round(ratio, 4) for ratio in ratios], **_rounded(rates))
        stand.figure(f"vllm_overhead_{load}", statistics.median(ratios))


def _rounded(rates: dict[str, list[float]]) -> dict[str, object]:
    return {f"{name}, qps": _shown(values) for name, values in rates.items()}


def measure_decode(stand: GpuStand) -> None:
    """Prompts arrive while eight answers run: loaded from the server, or found in vLLM's own cache."""
    size = stand.size
    beside = stand.mid_prompts("beside decode")
    streams = [stand.prompt(size.short_tokens, "stream", number) for number in range(8)]
    p99: dict[str, list[float]] = {"own": [], "loaded": []}
    one = stand.side_by_side()[KVTIER]
    stand.rate(one, beside, 2)
    for repeat in range(size.repeats + 1):  # the first is for warming up
        for state in _turns(repeat, list(p99)):
            wait_until_quiet()
            one.forget_prefixes()
            if state == "own":
                stand.rate(one, beside, 2)
            gaps = sorted(one.gaps_beside(streams, beside, every=8))
            if repeat:
                p99[state].append(gaps[int(0.99 * (len(gaps) - 1))])
    for state, values in p99.items():
        stand.add(what="between tokens, p99", state=state, ms=[round(1e3 * value, 2) for value in values])
    ratios = [loaded / own for loaded, own in zip(p99["loaded"], p99["own"], strict=True)]
    stand.figure("vllm_decode_p99_growth", statistics.median(ratios))


# --- starts and failures ---------------------------------------------------------------------------------------------


def measure_starts(stand: GpuStand) -> None:
    """An engine that starts with its server registers the server's memory while it captures graphs."""
    size = stand.size
    prompt = stand.prompt(size.mid_tokens, "starts")
    seconds = []
    for _ in range(size.num_starts):
        with (
            stand.server(memory=size.starting_memory) as server,
            stand.engine(server, shape=size.shape_for_starts, kv_cache_memory_bytes=4 * GIB) as one,
        ):
            cold = one.ask(prompt)
            wait_until_quiet()
            one.forget_prefixes()
            loaded = one.ask(prompt)
            _expect_cached([loaded], size.mid_tokens - 2 * size.page_tokens, "after a start")
            if loaded.tokens != cold.tokens:
                console.print("  other tokens after a load")
            seconds.append(one.start_s)
    stand.add(what="starts", state=f"server of {size.starting_memory}", s=[round(value, 1) for value in seconds])
    stand.figure("vllm_starts", len(seconds))


def measure_failures(stand: GpuStand) -> None:
    """All prompts are answered, although the server fails."""
    finished, asked = 0, 0
    for number, (name, act) in enumerate(FAILURES.items()):
        together, new = stand.mid_prompts("failures", number), stand.mid_prompts("failures, new", number)
        with stand.server() as server, stand.engine(server) as one:
            _, expected = stand.rate(one, together, 2)
            wait_until_quiet()
            one.forget_prefixes()
            loads, load_s = _asked_while(one, together, functools.partial(act, server), after_s=0.05)
            saves, save_s = _asked_while(one, new, functools.partial(act, server), after_s=1.0)
            if server.process.poll() is None:
                server.send_signal(signal.SIGCONT)
        asked += len(together) + len(new)
        finished += sum(len(answer.tokens) == 2 for answer in (*loads, *saves))
        same = round(_same(loads, expected), 3)
        stand.add(what="failures", state=name, loads_s=round(load_s, 2), saves_s=round(save_s, 2), same_as_before=same)
    stand.figure("vllm_finished_beside_failures", finished / asked)


FAILURES: dict[str, Callable[[ServerProcess], object]] = {
    "killed": lambda server: server.process.kill(),
    "hung": lambda server: server.send_signal(signal.SIGSTOP),
}


def _asked_while(
    one: VllmEngine, prompts: list[list[int]], act: Callable[[], object], *, after_s: float
) -> tuple[list[Answer], float]:
    timer = threading.Timer(after_s, act)
    timer.start()
    answers, seconds = one.ask_all(prompts, num_tokens=2)
    timer.join()
    return answers, seconds


# --- a hybrid model --------------------------------------------------------------------------------------------------


def measure_hybrid(stand: GpuStand) -> None:
    size = stand.size
    shape = size.shape if size.shape == SMALL else HYBRID
    prompts = [stand.long_prompt("hybrid", number) for number in range(3)]
    overrides: dict[str, Any] = {"shape": shape}
    if shape == HYBRID:
        kernels = {"gdn_prefill_backend": "triton"}  # other kernels would be compiled for minutes at their first use
        overrides |= {"block_size": None, "enable_prefix_caching": True, "additional_config": kernels}
    with stand.server() as server:
        with stand.engine(server, **overrides) as one:
            cold = [one.ask(prompt, num_tokens=16) for prompt in prompts]
            own = [one.ask(prompt, num_tokens=16) for prompt in prompts]
            wait_until_quiet()
        with stand.engine(server, **overrides) as one:
            wait_until_quiet()
            loaded = [one.ask(prompt, num_tokens=16) for prompt in prompts]
    for state, answers in {"cold": cold, "own": own, "new engine": loaded}.items():
        middle = 1e3 * statistics.median(answer.first_token_s for answer in answers)
        cached = [answer.num_cached for answer in answers]
        stand.add(what=f"first token, {shape}", state=state, ms=round(middle, 1), cached=cached)
    _expect_cached(loaded, size.long_tokens / 2, "a hybrid model in a new engine")
    first = [statistics.median(answer.first_token_s for answer in answers) for answers in (loaded, cold)]
    stand.figure("vllm_hybrid_restart_over_cold", first[0] / first[1])
    stand.figure("vllm_hybrid_same_tokens", _same(loaded, own))


PART: dict[str, Callable[[GpuStand], None]] = {
    "hits": measure_hits,
    "restart": measure_restart,
    "overhead": measure_overhead,
    "decode": measure_decode,
    "starts": measure_starts,
    "failures": measure_failures,
    "hybrid": measure_hybrid,
}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--whole-prompts", action="store_true", help="with the plug-in's setting of this name")
    parser.add_argument("--repeats", type=int, help="how often each thing is measured (5)")
    parser.add_argument("--small", action="store_true", help="a small model on a CPU, to try this program")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")
    parser.add_argument("--folder", metavar="DIRECTORY", help="where models and disks are; kept, unlike without")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
