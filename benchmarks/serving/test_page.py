"""What the page costs: an update and a load with 100,000 blocks, and tokens per second with the page and without it.

    python -m benchmarks.serving.test_page --quick

An update is all that one tick takes, in the HTTP server and in the cache server together: ask, compute, encode. A load
is what a chromium takes from its first request until it shows the tiers, or the tree of prefixes; without one it is
left out. The streams run against two deployments, with a page that a reader follows and without one, which take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import Result, console, finish, make_parser, print_table
from benchmarks.model_configs import MODEL_CONFIGS, SMALL_SHAPE
from benchmarks.serving.http_side import one_round
from benchmarks.serving.page_load import measure_load
from benchmarks.serving.rounds import Load, Round
from benchmarks.serving.word_tokenizer import save_word_tokenizer
from examples.use_remote_KV_cache.command import run_command
from examples.use_remote_KV_cache.deployment import Deployment
from kvtier import connect
from kvtier.api.config import ApiConfig, PageConfig, ShownCache
from kvtier.api.page.board import Board
from kvtier.api.page.deployment_view import DeploymentView
from kvtier.api.request_log import LoggedRequest
from kvtier.api.server import make_service
from kvtier.api.service import Service
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.transport.address import UnixAddress

_BARS = {
    "update_ms": "<= 5",
    "load_ms": "<= 1000",
    "prefixes_load_ms": "<= 1000",
    "page_on_over_off": ">= 0.99",
    "page_cpu_off_over_on": ">= 0.99",
    "page_cpu_share": "<= 0.01",
}
_TURNS, _QUICK_TURNS = (6, 10), (1, 2)
"""Sittings, and pairs of rounds in each: rounds of a few seconds differ by 3%, and the bar is 1%."""
_PROCESS = re.compile(r"^\S+ (http|cache|model) +\| starting, process (\d+)$", re.MULTILINE)
_NUM_BLOCKS = 100_000
_QUICK_BLOCKS = 10_000
_REQUESTS_PER_TICK = 34
"""A thousand a minute."""
_LOADS = 5
_BATCH = 2000
_NAMESPACE = Namespace(bytes(32))
_LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=16, dtype="float32")


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--without-streams", action="store_true", help="measure updates only")
    arguments = parser.parse_args()
    num_blocks = _QUICK_BLOCKS if arguments.quick else _NUM_BLOCKS
    repeats = arguments.repeats or (20 if arguments.quick else 100)
    rows, figures = measure_updates(num_blocks, repeats)
    if not arguments.without_streams:
        num_sittings, num_pairs = _QUICK_TURNS if arguments.quick else _TURNS
        more, of_streams = measure_streams(arguments.streams, num_sittings, num_pairs)
        rows += more
        figures |= of_streams
    print_table("the page", rows)
    bars = {name: bar for name, bar in _BARS.items() if name in figures}
    settings = {"num_blocks": num_blocks, "repeats": repeats, "streams": arguments.streams}
    return finish(Result("serving.test_page", settings, rows, figures), bars, arguments.json)


# --- updates ----------------------------------------------------------------------------------------------------------


def measure_updates(num_blocks: int, repeats: int) -> tuple[list[dict[str, object]], dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="kv-page-") as scratch:
        socket_path = str(Path(scratch, "c.sock"))
        memory = 2 * num_blocks * max(4096, _LAYOUT.block_bytes)
        server = CacheServer(CacheServerConfig(memory_bytes=memory, unix=UnixAddress(socket_path)))
        try:
            _fill(f"unix:{socket_path}", num_blocks)
            seconds, nbytes = asyncio.run(_updates(f"unix:{socket_path}", repeats))
            loads = measure_load(server, _LOADS) or {}
        finally:
            server.close()
    figures = {"update_ms": 1000 * statistics.median(seconds), "update_kib": nbytes / 1024}
    row: dict[str, object] = {
        "what": f"an update, {num_blocks:,} blocks",
        "ms_of_cpu": round(figures["update_ms"], 3),
        "slowest_ms": round(1000 * max(seconds), 3),
        "kib": round(figures["update_kib"], 1),
    }
    shown: list[dict[str, object]] = [
        {"what": f"{name} in a browser", "ms": round(each, 1)} for name, each in loads.items()
    ]
    return [row, *shown], {**figures, **loads}


def _fill(address: str, num_blocks: int) -> None:
    block = bytes(_LAYOUT.block_bytes)
    with connect(address, name="page", layout=_LAYOUT, namespace=_NAMESPACE, timeout_s=60) as client:
        for first in range(0, num_blocks, _BATCH):
            count = min(_BATCH, num_blocks - first)
            hashes = client.hashes(list(range(first * 16, (first + count) * 16)))
            client.set(hashes, [block] * count)


async def _updates(address: str, repeats: int) -> tuple[list[float], int]:
    """CPU seconds of each, of all threads of this process, and the bytes of the last."""
    config = ApiConfig(models=(), page=PageConfig(caches=(ShownCache("cache", address),)))
    service = make_service(config)
    view = DeploymentView(service)
    clock = 0.0
    assert config.page is not None
    board = Board(view, config.page, lambda: clock)
    seconds, last, nbytes = [], 0, 0
    for _ in range(repeats):
        for _ in range(_REQUESTS_PER_TICK):
            _end_request(service)
        clock += 2.0
        began_at = time.process_time()
        told, last = await board.events(last)
        seconds.append(time.process_time() - began_at)
        nbytes = sum(map(len, told))
    view.close()
    await service.close()
    return seconds, nbytes


def _end_request(service: Service) -> None:
    service.history.add(8000, {"device": 1000, "server": 4000, "disk": 2000})
    service.log.add(
        LoggedRequest(
            number=service.log.next_number(),
            request_id="chatcmpl-0123456789abcdef01234567",
            at=time.time(),
            model="Qwen2.5-7B-Instruct",
            engine="engine-0",
            prompt_tokens=8000,
            output_tokens=200,
            cached_tokens={"device": 1000, "server": 4000, "disk": 2000},
            ttft_s=0.1,
            finish_reason="stop",
            ended_at_tokens=7000,
            reason="never stored",
            tier="server",
        )
    )


# --- streams ----------------------------------------------------------------------------------------------------------


def measure_streams(
    num_streams: int, num_sittings: int, num_pairs: int
) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Rounds in pairs, one with the page and one without, each sitting in new processes.

    Figures are medians over all pairs, whose rounds are next to each other in time. The CPU time of a token, in all of
    a deployment's processes, says the same as tokens per second where others take the CPU away for a while. The page's
    own part is what the HTTP server and the cache server take.
    """
    pairs: list[tuple[_Turn, _Turn]] = []
    with tempfile.TemporaryDirectory(prefix="kv-page-") as scratch:
        load = _load(Path(scratch), num_streams)
        for sitting in range(num_sittings):
            with contextlib.ExitStack() as stack:
                order = (True, False) if sitting % 2 else (False, True)
                sides = {each: stack.enter_context(_serving(load, Path(scratch), has_page=each)) for each in order}
                pairs += asyncio.run(_take_turns([sides[True], sides[False]], load, sitting, num_pairs))
            console.print(f"sitting {sitting + 1} of {num_sittings}: {_shares(pairs[-num_pairs:])}")
    rows: list[dict[str, object]] = [
        {
            "what": f"{num_streams} streams, page {'on, one reader' if turn.has_page else 'off'}",
            "tokens_per_s": round(statistics.median(pair[side].round.tokens_per_s for pair in pairs), 1),
            "rounds_tokens_per_s": " ".join(f"{pair[side].round.tokens_per_s:.0f}" for pair in pairs),
        }
        for side, turn in enumerate(pairs[0])
    ]
    rows.append({"what": "on over off, all pairs", "ratios": _shares(pairs)})
    return rows, {
        "page_on_over_off": statistics.median(_ratio(pair) for pair in pairs),
        "page_cpu_off_over_on": statistics.median(off.cpu_s_per_token / on.cpu_s_per_token for on, off in pairs),
        "page_cpu_share": statistics.median(on.servers_share - off.servers_share for on, off in pairs),
    }


class _Turn(msgspec.Struct, frozen=True):
    """A round, and the CPU seconds of its deployment meanwhile: of HTTP server and cache server, and of its engine."""

    has_page: bool
    round: Round
    servers_s: float
    engine_s: float

    @property
    def servers_share(self) -> float:
        """Of one core."""
        return self.servers_s / self.round.seconds

    @property
    def cpu_s_per_token(self) -> float:
        return (self.servers_s + self.engine_s) / self.round.num_tokens


def _ratio(pair: tuple[_Turn, _Turn]) -> float:
    on, off = pair
    return on.round.tokens_per_s / off.round.tokens_per_s


def _shares(pairs: list[tuple[_Turn, _Turn]]) -> str:
    """The ratios in order: their spread shows how quiet the machine was."""
    return " ".join(f"{each:.3f}" for each in sorted(map(_ratio, pairs)))


class _Side:
    """A running deployment, with a page or without one."""

    def __init__(self, port: int, log: Path, *, has_page: bool) -> None:
        self.has_page = has_page
        self._port = port
        parts = dict(_PROCESS.findall(log.read_text()))
        assert len(parts) == 3, "the log names the HTTP server, the cache server and the engine"
        self._servers, self._engine = (parts["http"], parts["cache"]), (parts["model"],)

    async def take_turn(self, load: Load, number: int) -> _Turn:
        async with _reading(self._port) if self.has_page else contextlib.nullcontext():
            servers_s, engine_s = _cpu_s(self._servers), _cpu_s(self._engine)
            found = await one_round(self._port, load, load.prompts(number))
            return _Turn(self.has_page, found, _cpu_s(self._servers) - servers_s, _cpu_s(self._engine) - engine_s)


def _cpu_s(processes: Sequence[str]) -> float:
    """What these processes have taken so far, with the threads that ended."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def _take_turns(sides: list[_Side], load: Load, sitting: int, num_pairs: int) -> list[tuple[_Turn, _Turn]]:
    load = msgspec.structs.replace(load, seed=sitting)
    for side in sides:
        await side.take_turn(load, 0)
    found = []
    for number in range(1, num_pairs + 1):
        on, off = sides
        if number % 2:
            first = await on.take_turn(load, number)
            found.append((first, await off.take_turn(load, number)))
        else:
            last = await off.take_turn(load, number)
            found.append((await on.take_turn(load, number), last))
    return found


def _load(scratch: Path, num_streams: int) -> Load:
    folder = scratch / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIGS[SMALL_SHAPE]))
    vocab_size = MODEL_CONFIGS[SMALL_SHAPE]["vocab_size"]
    assert isinstance(vocab_size, int)
    save_word_tokenizer(folder, vocab_size)
    return Load(
        engine={"model": str(folder), "load_format": "dummy", "max_num_requests": num_streams, "device": "cpu"},
        vocab_size=vocab_size,
        num_streams=num_streams,
        input_tokens=64,
        output_tokens=64,
        num_rounds=1,
    )


@contextlib.contextmanager
def _serving(load: Load, scratch: Path, *, has_page: bool) -> Iterator[_Side]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    name = "on" if has_page else "off"
    file, log_file = scratch / f"{name}.yml", scratch / f"{name}.log"
    document = {
        "models": [{**load.engine, "name": "model", "kv_cache_space": "512MiB"}],
        "cache": {"memory": "256MiB"},
        "http": {"openai": port, "ollama": None},
        "page": {"enabled": has_page},
    }
    file.write_text(json.dumps(document))  # JSON is YAML
    with log_file.open("w") as log, Deployment(file, url=f"http://127.0.0.1:{port}", log=log):
        yield _Side(port, log_file, has_page=has_page)


@contextlib.asynccontextmanager
async def _reading(port: int) -> AsyncIterator[None]:
    """A browser has the page open. Raises `RuntimeError` if the server has no such stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(b"GET /kvtier/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the page's stream cannot be read: {status.decode(errors='replace').strip()}")

    async def read() -> None:
        while await reader.read(1 << 16):
            pass

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        writer.close()


if __name__ == "__main__":
    sys.exit(run_command(main))
