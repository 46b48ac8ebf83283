"""What the page costs: an update and a load with 100,000 blocks, and tokens per second with the page and without it.

    python -m benchmarks.serving.test_page --quick

An update is all that one tick takes, in the HTTP server and in the cache server together: ask, compute, encode. A load
is what a chromium takes from its first request until it shows the tiers, or the tree of prefixes; without one it is
left out. The streams run against deployments with a page that a reader follows, and without one; they take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from benchmarks.harness import Result, console, finish, make_parser, print_table
from benchmarks.model_configs import MODEL_CONFIGS, SMALL_SHAPE
from benchmarks.serving.page_load import measure_load
from benchmarks.serving.rounds import Load, Round
from benchmarks.serving.word_tokenizer import save_word_tokenizer
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

_BARS = {"update_ms": "<= 5", "load_ms": "<= 1000", "prefixes_load_ms": "<= 1000", "page_on_over_off": ">= 0.99"}
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
        more, on_over_off = measure_streams(arguments.streams, num_turns=2 if arguments.quick else 4)
        rows += more
        figures["page_on_over_off"] = on_over_off
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


def measure_streams(num_streams: int, num_turns: int) -> tuple[list[dict[str, object]], float]:
    """The medians of both sides, which take turns, each time in new processes."""
    rounds: dict[bool, list[Round]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="kv-page-") as scratch:
        load = _load(Path(scratch), num_streams)
        for turn in range(num_turns):
            for has_page in (True, False) if turn % 2 else (False, True):
                console.print(f"turn {turn + 1} of {num_turns}: page {'on' if has_page else 'off'}")
                with _serving(load, Path(scratch), has_page=has_page) as port:
                    rounds[has_page] += _side(port, msgspec.structs.replace(load, seed=turn))
    rows: list[dict[str, object]] = [
        {
            "what": f"{num_streams} streams, page {'on, one reader' if has_page else 'off'}",
            "tokens_per_s": round(_median(found), 1),
            "rounds_tokens_per_s": " ".join(f"{one.tokens_per_s:.0f}" for one in found),
        }
        for has_page, found in rounds.items()
    ]
    return rows, _median(rounds[True]) / _median(rounds[False])


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
        output_tokens=128,
        num_rounds=4,
    )


@contextlib.contextmanager
def _serving(load: Load, scratch: Path, *, has_page: bool) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    file = scratch / "deploy.yml"
    document = {
        "models": [{**load.engine, "name": "model", "kv_cache_space": "512MiB"}],
        "cache": {"memory": "256MiB"},
        "http": {"openai": port, "ollama": None},
        "page": {"enabled": has_page},
    }
    file.write_text(json.dumps(document))  # JSON is YAML
    url = f"http://127.0.0.1:{port}"
    with (scratch / "log").open("w") as log, Deployment(file, url=url, log=log):
        with _reading(url) if has_page else contextlib.nullcontext():
            yield port


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    """Somebody has the page open."""
    is_over = threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{url}/kvtier/v1/events", timeout=60) as response:
            for _ in response.iter_bytes():
                if is_over.is_set():
                    return

    reader = threading.Thread(target=read, name="kvtier-bench-reader", daemon=True)
    reader.start()
    try:
        yield
    finally:
        is_over.set()
        reader.join()


def _side(port: int, load: Load) -> list[Round]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving.http_side", str(port)],
        input=msgspec.json.encode(load),
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=list[Round])


def _median(rounds: list[Round]) -> float:
    return float(statistics.median(one.tokens_per_s for one in rounds))


if __name__ == "__main__":
    sys.exit(main())
