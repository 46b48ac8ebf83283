"""The tables: the command of each, where it runs, how long it takes there, its result files and pictures.

S0 to S4 are the documents: remote KV cache, offloading, using it, prefix caching, Vineyard. A table may consist of
several runs, each short enough to share ten minutes with others. The most important come first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "seeds"
GPU, CPU = "gpu", "cpu"
MACHINES: Mapping[str, str] = {GPU: "h200", CPU: "cpu"}
"""Prefixes of result files, by kind of machine."""

_ENGINE_TINY = ("--quick", "--device", "cpu", "--prompts", "2")
_TINY = (*_ENGINE_TINY, "--input-tokens", "72", "--always-load")
_STORE_TINY = (*_TINY, "--pairs", "1", "--turns", "1", "--batched-tokens", "64")
_HITS_TINY = (*_TINY, "--output-tokens", "2", "--repeats", "1")
_ON, _OFF = ("--managers", "prefix_caching"), ("--managers", "disable_prefix_caching")


@dataclass(frozen=True)
class Run:
    """One command. `seconds` is its approximate time by kind of machine; `part` distinguishes the runs of a table."""

    arguments: tuple[str, ...]
    tiny: tuple[str, ...]
    seconds: Mapping[str, int]
    part: str = ""


@dataclass(frozen=True)
class Table:
    """`needs` are the kinds of machines whose results are kept. `pictures` are names of PNG files, without suffix.

    With `file`, this is not a table of the documents but another result of the project, in that file.
    """

    name: str
    title: str
    module: str
    runs: tuple[Run, ...]
    pictures: tuple[str, ...] = ()
    needs: tuple[str, ...] = field(default=(GPU,))
    file: str = ""

    def result_of(self, run: Run, machine: str, folder: Path = RESULTS) -> Path:
        if self.file:
            return (RESULTS.parent if folder == RESULTS else folder) / f"{MACHINES[machine]}_{self.file}.json"
        parts = (MACHINES[machine], *self.name.split("-"), *((run.part,) if run.part else ()))
        return folder / f"{'_'.join(parts)}.json"

    def results(self, machine: str, folder: Path = RESULTS) -> list[Path]:
        return [self.result_of(run, machine, folder) for run in self.runs]

    def command(self, run: Run, target: Path, *, is_tiny: bool = False) -> list[str]:
        arguments = run.tiny if is_tiny else run.arguments
        return [sys.executable, "-m", f"benchmarks.{self.module}", *arguments, "--json", str(target)]

    def picture(self, name: str, folder: Path = RESULTS) -> Path:
        return folder / f"{name}.png"


def _rates(*rates: int) -> tuple[str, ...]:
    return ("--hit-rates", *map(str, rates))


TABLES: tuple[Table, ...] = (
    Table(
        "s2-stress",
        "S2, stress_test: six documents of 100,000 tokens",
        "use_remote_KV_cache.stress_test",
        (Run((), ("--quick", "--device", "cpu", "--n", "2", "--length", "600"), {GPU: 200}),),
        ("s2-stress", "s2-stress-triangle"),
    ),
    Table(
        "s2-speed",
        "S2, speed_test: one document of 100,000 tokens",
        "use_remote_KV_cache.speed_test",
        (Run((), ("--quick", "--device", "cpu", "--length", "600"), {GPU: 150}),),
    ),
    Table(
        "s0-long-prefill",
        "S0, test_long_prefill: 10 prompts x 10,240 tokens, six rounds, the engine restarted before the fourth",
        "remote_kv_cache.test_long_prefill",
        (
            Run(_ON, (*_TINY, *_ON, "--outputs", "2", "4"), {GPU: 150}, "on"),
            Run(_OFF, (*_TINY, *_OFF, "--outputs", "2", "4"), {GPU: 150}, "off"),
        ),
    ),
    Table(
        "s1-long-prefill",
        "S1, test_long_prefill: 10 prompts x 10,240 tokens, three rounds",
        "offloading_KV_cache.test_long_prefill",
        (Run(("--ttft-tokens", "0"), (*_TINY, "--outputs", "2", "4", "--ttft-tokens", "0"), {GPU: 190}),),
    ),
    Table(
        "s3-long-prefill",
        "S3, test_long_prefill: 10 prompts x 10,240 tokens, four block managers, three rounds",
        "prefix_caching.test_long_prefill",
        (
            Run(
                ("--parts", "long"),
                (*_ENGINE_TINY, "--parts", "long", "--managers", "naive", "yoco", "--outputs", "2", "4"),
                {GPU: 160},
            ),
        ),
    ),
    Table(
        "s1-prefills",
        "S1, test_prefills: one prompt of 8,192 tokens, computed and copied, eight models",
        "offloading_KV_cache.baseline.test_prefills",
        (
            Run(
                (),
                (*_ENGINE_TINY, "--input-tokens", "64", "--model-shape", "small", "--weights", "plain", "GPTQ-Int4"),
                {GPU: 270},
            ),
        ),
    ),
    Table(
        "s0-memory-io",
        "S0, test_memory_io: 512 blocks of 16 tokens within memory, five models' shapes",
        "remote_kv_cache.baseline.test_memory_io",
        (Run(("--repeats", "3"), ("--quick", "--model-shape", "Qwen2.5-3B", "--repeats", "1"), {GPU: 130, CPU: 90}),),
        needs=(GPU, CPU),
    ),
    Table(
        "s1-swap",
        "S1, test_swap: 512 blocks of 16 tokens between host memory and the GPU",
        "offloading_KV_cache.baseline.test_swap",
        (Run((), ("--quick", "--model-shape", "Qwen2.5-3B", "--repeats", "1"), {GPU: 100}),),
    ),
    Table(
        "s1-profiler-swap-out",
        "S1, profiler: swap out",
        "offloading_KV_cache.profiler.swap_out",
        (Run((), (*_ENGINE_TINY, "--input-tokens", "72"), {GPU: 45}),),
        ("s1-profiler-swap-out",),
    ),
    Table(
        "s1-profiler-swap-in",
        "S1, profiler: swap in, and its overlap with compute",
        "offloading_KV_cache.profiler.swap_in",
        (Run((), (*_ENGINE_TINY, "--input-tokens", "72"), {GPU: 45}),),
        ("s1-profiler-swap-in", "s1-profiler-overlap"),
    ),
    Table(
        "s1-swap-out",
        "S1, test_swap_out: 4 prompts x 8,192 new tokens, with host memory and without",
        "offloading_KV_cache.test_swap_out",
        (Run(_ON, (*_STORE_TINY, *_ON), {GPU: 140}, "on"), Run(_OFF, (*_STORE_TINY, *_OFF), {GPU: 140}, "off")),
    ),
    Table(
        "s0-transfer-out",
        "S0, test_transfer_out: 4 prompts x 8,192 new tokens, with a cache server and without",
        "remote_kv_cache.test_transfer_out",
        (Run(_ON, (*_STORE_TINY, *_ON), {GPU: 150}, "on"), Run(_OFF, (*_STORE_TINY, *_OFF), {GPU: 150}, "off")),
    ),
    Table(
        "s1-swap-in",
        "S1, test_swap_in: 1,000 prompts, 1,000 tokens in, 24 out, over the share of a common prefix",
        "offloading_KV_cache.test_swap_in",
        (
            Run(_rates(0, 20, 40, 60, 80, 100), (*_HITS_TINY, *_rates(0, 50)), {GPU: 230}, "even"),
            Run(_rates(10, 30, 50, 70, 90), (*_HITS_TINY, *_rates(30)), {GPU: 220}, "odd"),
        ),
        ("s1-swap-in",),
    ),
    Table(
        "s3-baseline",
        "S3, baseline: 1,000 prompts, 1,000 tokens in, 24 out, over the share of a common prefix",
        "prefix_caching.baseline",
        tuple(
            Run(
                ("--parts", "table", *_rates(*rates)),
                (*_ENGINE_TINY, "--parts", "table", "--few", "2", *_rates(rates[0])),
                {GPU: seconds},
                str(number),
            )
            for number, (rates, seconds) in enumerate(
                (((0, 100), 190), ((10, 20, 90), 300), ((30, 40, 80), 280), ((50, 60, 70), 240)), 1
            )
        ),
        ("s3-baseline",),
    ),
    *(
        Table(
            f"s0-transfer-in-{state}",
            f"S0, test_transfer_in: the same prompts before and after a restart, GPU cache {state}",
            "remote_kv_cache.test_transfer_in",
            (
                Run((*which, *_rates(0, 10, 20, 80, 90, 100)), (*_HITS_TINY, *which, *_rates(0, 50)), {GPU: 240}, "1"),
                Run((*which, *_rates(30, 40, 50, 60, 70)), (*_HITS_TINY, *which, *_rates(30)), {GPU: 200}, "2"),
            ),
            (f"s0-transfer-in-{state}",),
        )
        for state, which in (("off", _OFF), ("on", _ON))
    ),
    Table(
        "s0-server",
        "S0, test_server: the same blocks through the cache server",
        "remote_kv_cache.baseline.test_server",
        (Run(("--repeats", "7"), ("--quick", "--model-shape", "Qwen2.5-3B", "--repeats", "1"), {GPU: 300, CPU: 300}),),
        needs=(CPU,),
    ),
    Table(
        "s0-zmq",
        "S0, test_zmq_transfer: the same blocks over ZeroMQ",
        "remote_kv_cache.baseline.test_zmq_transfer",
        (Run((), ("--quick", "--model-shape", "Qwen2.5-3B", "--repeats", "1"), {CPU: 150}),),
        needs=(CPU,),
    ),
    Table(
        "s4-file-store",
        "S4, the file store on one node: 5 MiB a token",
        "vineyard.test_file_store",
        (Run((), ("--quick", "--repeats", "1"), {GPU: 260, CPU: 450}),),
        needs=(CPU,),
    ),
    Table(
        "s4-processes",
        "S4, the file store under processes of two hosts, on one folder: 5 MiB a token",
        "vineyard.test_shared_folder",
        (Run((), ("--quick", "--processes", "2", "--chunks", "1"), {GPU: 200, CPU: 250}),),
        needs=(CPU,),
    ),
)

_QUICK_TINY = ("--quick", "--repeats", "1")
_STORE_CPU = ("--quick", "--pairs", "7", "--turns", "9")
OTHERS: tuple[Table, ...] = tuple(
    Table(
        f"cpu-{file.removeprefix('test_').replace('_', '-')}",
        f"The README's figures of `{module}`",
        module,
        (Run(arguments, tiny, {CPU: seconds}),),
        needs=(CPU,),
        file=file,
    )
    for file, module, arguments, tiny, seconds in (
        ("test_disk", "persistence_kv_cache.test_disk", (), _QUICK_TINY, 200),
        ("test_huge_pages", "persistence_kv_cache.test_huge_pages", (), _QUICK_TINY, 60),
        ("baseline", "prefix_caching.baseline", (), (*_ENGINE_TINY, "--parts", "schedule"), 1500),
        ("test_swap_out", "offloading_KV_cache.test_swap_out", _STORE_CPU, _STORE_TINY, 180),
        ("test_transfer_out", "remote_kv_cache.test_transfer_out", _STORE_CPU, _STORE_TINY, 180),
        ("test_transfer_in", "remote_kv_cache.test_transfer_in", ("--quick",), (*_HITS_TINY, *_rates(0)), 90),
        ("test_load_or_compute", "remote_kv_cache.test_load_or_compute", (), ("--quick", "--device", "cpu"), 420),
        ("speed_test", "use_remote_KV_cache.speed_test", (), ("--quick", "--length", "600"), 90),
        ("test_shared_memory", "vineyard.test_shared_memory", (), _QUICK_TINY, 60),
    )
)
"""Other results, measured on a CPU and shown in the documents."""


def tables_of(names: list[str]) -> list[Table]:
    """Tables by name, in the order of the registry. Raises `ValueError` for an unknown name."""
    known = [table.name for table in (*TABLES, *OTHERS)]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"no such table: {', '.join(unknown)}; there are {', '.join(known)}")
    return [table for table in (*TABLES, *OTHERS) if not names or table.name in names]


def runs_on(machine: str, tables: list[Table]) -> Iterator[tuple[Table, Run]]:
    """The runs that this kind of machine can do, the needed ones first."""
    for is_needed in (True, False):
        for table in tables:
            if (machine in table.needs) == is_needed:
                for run in table.runs:
                    if machine in run.seconds:
                        yield table, run
