"""After a restart: long prompts from a cache server's memory, over TCP and from its disk, each beside its limit.

    python -m benchmarks.remote_kv_cache.test_restart [--quick] [--parts server tcp disk] [--json FILE] [--folder DIR]

10 prompts x 10240 random tokens, all submitted at once, 2 tokens out. An engine computes them, into a cache server with
memory and disk, and is closed. Engines started after it have the device's cache off, so that every round loads, and
take turns with what they are compared with:

- `server`: a new engine on the server's memory, beside one with the same prompts in host memory of its own.
- `tcp`: the server over TCP, nothing kept in between, beside a bare socket loop over one and four connections.
- `disk`: engines and server are new. One engine always loads, beside direct reads of a file on the same filesystem
  (the best of several numbers of threads); one decides, beside computing. The server has `--disk-only` by then, so that
  every round reads.

Less on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import BlockMemory, Result, console, print_table
from benchmarks.persistence_kv_cache.test_disk import RawFile
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Round, Variant
from benchmarks.prefix_caching.options import conclude, is_h200, parse
from benchmarks.raw_socket import RawPeer
from benchmarks.tier_stand import (
    DEVICE_OFF,
    chosen,
    expect_hits,
    expect_tokens,
    full_share,
    kv_bytes,
    make_tier_parser,
    median_ratio,
    settings_of,
    shown_shares,
    warm_up,
)
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.tiers.host import HostTier
from kvtier.tiers.remote import RemoteTier

GPU_SHAPE = "Qwen2.5-7B"
PARTS = ("server", "tcp", "disk")
H200_BARS = {
    "server": {"server_over_host": ">= 0.95"},
    "disk": {"disk_of_raw": ">= 0.9", "disk_decided_over_computing": ">= 0.98"},
}
"""The bars of each part. Deciding is never slower than computing, within the noise between two equal runs."""

LOADING = Variant(DEVICE_OFF)
COMPUTING = Variant(DEVICE_OFF, has_tiers=False)
HOST, SERVER, TCP, DISK, DECIDES, COMPUTES = "host", "server", "tcp", "disk", "disk, decides", "computed"
RAW_CONNECTIONS = (1, 4)
RAW_THREADS = (4, 16)
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Size:
    """How much is measured. A bare socket moves `raw_blocks` of `raw_block_bytes`, a bare disk all that was stored."""

    prompts: int
    input_tokens: int
    output_tokens: int
    repeats: int
    raw_blocks: int
    raw_block_bytes: int
    max_num_requests: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Stored:
    """The answers of the first engine."""

    prompts: list[list[int]]
    answers: Round
    nbytes: int


@dataclass(frozen=True)
class Turn:
    """A contender: an engine that answers all prompts. `before` is not timed."""

    stand: EngineStand
    variant: Variant
    tiers: tuple[str, ...]
    before: Callable[[], object] = lambda: None
    may_compute: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_tier_parser(__doc__ or "", GPU_SHAPE)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--output-tokens", type=int, help="how long an answer is")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the disk's files go")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("remote_kv_cache.test_restart", {**settings_of(arguments, size), "parts": list(arguments.parts)})
    bars: dict[str, str] = {}
    if is_h200(arguments.device):
        for part in arguments.parts:
            bars |= H200_BARS.get(part, {})
    return conclude(result, arguments, bars, lambda: Restart(arguments, size, result).measure())


class Restart:
    """The benchmark, and the state shared by its parts."""

    def __init__(self, arguments: argparse.Namespace, size: Size, result: Result) -> None:
        self._arguments = arguments
        self._size = size
        self._result = result
        self._run_tokens = size.prompts * (size.input_tokens + size.output_tokens + 16)
        self._memory = kv_bytes(arguments, self._run_tokens + 8 * size.input_tokens)
        self._num_engines = 0

    def measure(self) -> None:
        parts = self._arguments.parts
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=self._arguments.folder) as folder:
            has_disk = "disk" in parts
            with self._server(Path(folder), has_disk=has_disk) as server:
                stored = self._store(server)
                if "server" in parts:
                    self._measure_server(server, stored)
                if "tcp" in parts:
                    self._measure_tcp(server, stored)
            if has_disk:
                with self._server(Path(folder), "--disk-only", has_disk=True) as server:
                    self._measure_disk(server, stored, Path(folder))
        size = self._size
        print_table(
            f"{size.prompts} prompts x {size.input_tokens} tokens, {size.output_tokens} out, after a restart",
            self._result.rows,
        )

    # --- parts -----------------------------------------------------------------------------------------------------

    def _measure_server(self, server: ServerProcess, stored: Stored) -> None:
        with (
            self._engine({"swap_space": self._memory}) as own,
            self._engine({"cache_server": server.unix}) as other,
        ):
            own.use(LOADING)
            own.run(stored.prompts, self._size.output_tokens)
            own.settle()
            qps = self._take_turns(
                {HOST: Turn(own, LOADING, ("host",)), SERVER: Turn(other, LOADING, ("server",))}, stored
            )
        self._note(HOST, qps, stored)
        self._note(SERVER, qps, stored)
        self._result.figures["server_over_host"] = median_ratio(qps[SERVER], qps[HOST])

    def _measure_tcp(self, server: ServerProcess, stored: Stored) -> None:
        settings = {"cache_server": server.tcp, "cache_server_token": server.token, "always_load": True}
        raw_gbs = {f"raw socket, {count} connections": self._raw_socket_gbs(count) for count in RAW_CONNECTIONS}
        with self._engine(settings) as stand:
            turn = Turn(stand, LOADING, ("server",), before=lambda: _forget_host(stand))
            qps = self._take_turns({TCP: turn}, stored)
        self._note(TCP, qps, stored)
        for name, gbs in raw_gbs.items():
            self._add_row({"what": name, "GB/s": round(gbs, 2)})
        gbs = _gbs(qps[TCP], stored)
        self._result.figures["tcp_gbs"] = gbs
        self._result.figures["tcp_of_raw_socket"] = gbs / max(raw_gbs.values())

    def _measure_disk(self, server: ServerProcess, stored: Stored, folder: Path) -> None:
        nbytes = self._size.raw_block_bytes
        num_blocks = -(-stored.nbytes // nbytes)  # as many bytes: some disks are fast for a moment only
        source = BlockMemory(num_blocks, nbytes, seed=3)
        target = BlockMemory(num_blocks, nbytes)
        raw_gbs: dict[int, list[float]] = {threads: [] for threads in RAW_THREADS}
        settings = {"cache_server": server.unix}
        with (
            RawFile(folder / "raw", source, target) as raw,
            self._engine({**settings, "always_load": True}) as always,
            self._engine({**settings, "always_load": False}) as decides,
        ):

            def read_raw() -> None:
                for threads, values in raw_gbs.items():
                    values.append(source.nbytes / raw.read(threads) / 1e9)

            qps = self._take_turns(
                {
                    DISK: Turn(always, LOADING, ("disk",), before=read_raw),
                    DECIDES: Turn(decides, LOADING, ("disk",), may_compute=True),
                    COMPUTES: Turn(decides, COMPUTING, ()),
                },
                stored,
            )
        for name in (DISK, DECIDES, COMPUTES):
            self._note(name, qps, stored)
        for threads, values in raw_gbs.items():
            gbs, least = statistics.median(values[1:]), min(values[1:])
            self._add_row(
                {"what": f"raw direct reads, {threads} threads", "least": round(least, 2), "GB/s": round(gbs, 2)}
            )
        best_raw = [max(turn) for turn in zip(*(values[1:] for values in raw_gbs.values()), strict=True)]
        figures = self._result.figures
        figures["disk_gbs"] = _gbs(qps[DISK], stored)
        figures["disk_raw_gbs"] = statistics.median(best_raw)
        figures["disk_of_raw"] = median_ratio([_gbs([rate], stored) for rate in qps[DISK]], best_raw)
        figures["disk_decided_over_computing"] = median_ratio(qps[DECIDES], qps[COMPUTES])

    # --- what they share -------------------------------------------------------------------------------------------

    def _store(self, server: ServerProcess) -> Stored:
        """Compute all prompts by an engine that is closed afterwards; they are on disk too, if there is one."""
        size = self._size
        with self._engine({"cache_server": server.unix}) as stand:
            self._result.settings = {**self._result.settings, **stand.settings()}
            prompts = PromptMaker(stand.vocab_size, seed=1).make(size.prompts, size.input_tokens)
            stand.use(LOADING)
            answers = stand.run(prompts, size.output_tokens)
            expect_hits(answers, (), 0.0, "the first engine")
            stand.settle()
            assert stand.llm.engine.transfer.traffic is not None
            for guard in stand.llm.engine.transfer.traffic.hierarchy.guards:
                if isinstance(guard.tier, RemoteTier):
                    guard.tier.client.flush(timeout_s=_PATIENCE_S)
            layout = stand.llm.engine.arena.layout
            num_blocks = size.prompts * int(full_share(size.input_tokens) * size.input_tokens / layout.block_tokens)
            console.print(f"the first engine computed {answers.qps:.2f} prompts a second")
            return Stored(prompts, answers, num_blocks * layout.block_bytes)

    def _take_turns(self, turns: Mapping[str, Turn], stored: Stored) -> dict[str, list[float]]:
        """Requests per second of each, after one untimed turn each."""
        size = self._size
        qps: dict[str, list[float]] = {name: [] for name in turns}
        for repeat in range(size.repeats + 1):
            names = list(turns)
            for name in names if repeat % 2 == 0 else reversed(names):
                turn = turns[name]
                turn.before()
                turn.stand.use(turn.variant)
                done = turn.stand.run(stored.prompts, size.output_tokens)
                share = full_share(size.input_tokens) if turn.tiers else 0.0
                if not turn.may_compute:
                    expect_hits(done, turn.tiers, share, name)
                expect_tokens(done, stored.answers, self._arguments.device, name)
                turn.stand.settle()
                console.print(f"{name}, turn {repeat}: {done.qps:.2f} QPS from {shown_shares(done.shares)}")
                if repeat:
                    qps[name].append(done.qps)
        return qps

    def _note(self, name: str, qps: Mapping[str, Sequence[float]], stored: Stored) -> None:
        row: dict[str, object] = {
            "what": name,
            "QPS": round(statistics.median(qps[name]), 3),
            "least": round(min(qps[name]), 3),
            "over the first engine": round(statistics.median(qps[name]) / stored.answers.qps, 2),
        }
        if name not in (DECIDES, COMPUTES):
            row["GB/s"] = round(_gbs(qps[name], stored), 2)
        self._add_row(row)
        count = self._size.output_tokens
        if self._arguments.device == "cuda" and name in (HOST, SERVER, TCP, DISK):
            self._result.figures[f"{'same_run_host' if name == HOST else name}_hit_n{count}"] = statistics.median(
                qps[name]
            )
        self._result.figures[f"{name.replace(', ', '_')}_over_first"] = (
            statistics.median(qps[name]) / stored.answers.qps
        )

    def _add_row(self, row: dict[str, object]) -> None:
        console.print(", ".join(f"{key} {value}" for key, value in row.items()))
        self._result.rows.append(row)

    def _raw_socket_gbs(self, num_connections: int) -> float:
        """Received by a bare loop."""
        size = self._size
        target = BlockMemory(size.raw_blocks, size.raw_block_bytes)
        peer = RawPeer(size.raw_blocks, size.raw_block_bytes, num_connections)
        seconds = []
        try:
            for _ in range(4):
                started_at = time.perf_counter()
                peer.get(target.blocks)
                seconds.append(time.perf_counter() - started_at)
        finally:
            peer.close()
        return target.nbytes / statistics.median(seconds[1:]) / 1e9

    @contextlib.contextmanager
    def _server(self, folder: Path, *options: str, has_disk: bool) -> Iterator[ServerProcess]:
        if has_disk:
            options = (*options, "--folder", str(folder / "cache"), "--disk", str(3 * self._memory + (1 << 26)))
        with cache_server("--max-leased", str(self._memory), *options, memory=str(self._memory), tcp=True) as server:
            yield server

    @contextlib.contextmanager
    def _engine(self, settings: dict[str, Any]) -> Iterator[EngineStand]:
        """Ready to be timed. Several of them fit on a GPU."""
        size = self._size
        with EngineStand(
            self._arguments.model_shape,
            self._arguments.device,
            clock=time.perf_counter,
            kv_cache_space=kv_bytes(self._arguments, self._run_tokens + size.input_tokens),
            max_model_len=size.input_tokens + size.output_tokens + 32,
            max_num_requests=size.max_num_requests,
            max_num_batched_tokens=size.max_num_batched_tokens,
            **{"always_load": self._arguments.always_load, **settings},
        ) as stand:
            self._num_engines += 1
            warm_up(stand, PromptMaker(stand.vocab_size, seed=1000 + self._num_engines), 1, size.input_tokens)
            yield stand


def _gbs(qps: Sequence[float], stored: Stored) -> float:
    return statistics.median(qps) / len(stored.prompts) * stored.nbytes / 1e9


def _forget_host(stand: EngineStand) -> None:
    """Empty the host tier, so that blocks loaded over TCP are loaded over TCP again."""
    stand.settle()
    assert stand.llm.engine.transfer.traffic is not None
    for guard in stand.llm.engine.transfer.traffic.hierarchy.guards:
        if isinstance(guard.tier, HostTier):
            guard.tier.drop()


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            prompts=10,
            input_tokens=10240,
            output_tokens=2,
            repeats=3 if quick else 5,
            raw_blocks=128,
            raw_block_bytes=16 << 20,
            max_num_requests=128,
            max_num_batched_tokens=8192,
        )
    else:
        size = Size(
            prompts=2 if quick else 4,
            input_tokens=1024 if quick else 2048,
            output_tokens=2,
            repeats=3,
            raw_blocks=64,
            raw_block_bytes=1 << 20,
            max_num_requests=16,
            max_num_batched_tokens=512,
        )
    names = ("prompts", "input_tokens", "output_tokens", "repeats", "max_num_requests", "max_num_batched_tokens")
    return Size(**{**vars(size), **chosen(arguments, *names)})


if __name__ == "__main__":
    sys.exit(main())
