"""An agents' trace through an engine on a GPU: server memory and disk below it with each policy, and no tiers.

    python -m benchmarks.eviction.replayed [--device cpu] [--quick] [--requests N] [--trace FILE] [--folder DIR]

The trace, scaled down: a block of 512 tokens becomes one of `--tokens` (32), answers have 16 tokens, prompts that are
too long are left out, and the first `--start` (2,000) requests, when few sessions had begun. Requests are handed over
in the trace's order, at most `--in-flight` (4) at once, and each waits for the one before it in its session. The device
has room for a 24th of all different blocks, memory for an eighth, the disk for a quarter. Every variant has an engine,
a server and a folder of its own, one after another, and starts with nothing. The model has the shape of Qwen2.5-7B and
random weights; on a CPU it is a tiny one. Ends with status 1 if a figure misses its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.eviction.served import TRACE
from benchmarks.eviction.synthetic import synthetic_traces
from benchmarks.harness import Result, console, print_table
from benchmarks.model_configs import model_folder
from benchmarks.prefix_caching.engine_stand import kv_bytes_of
from benchmarks.prefix_caching.options import conclude, device_settings, is_h200, make_parser, parse
from kvtier import LLM, SamplingParams
from kvtier.engine.client import EngineClient
from kvtier.simulate.tiers import share_of_sorted
from kvtier.simulate.trace import TracedRequest, by_arrival, read_traces
from kvtier.testing.servers import cache_server

BARS = {"rps_over_lru": ">= 1", "mean_ttft_over_lru": "<= 1", "rps_over_none": ">= 1", "mean_ttft_over_none": "<= 1"}
VARIANTS = ("adaptive", "lru", "none")
_DEVICE_SHARE, _MEMORY_SHARE, _DISK_SHARE = 1 / 24, 1 / 8, 1 / 4
"""Of the bytes of all different blocks. Of 500 requests' tokens, LRU hits 0.28 in as many blocks as memory has room
for, and 0.71 in as many as the disk has."""
_MAX_TOKENS = {"cuda": 16_000, "cpu": 4_000}
"""Of a prompt."""
_BLOCK_TOKENS = 16
_NUM_OUTPUTS = 16
_PARAMS = SamplingParams(max_tokens=_NUM_OUTPUTS, temperature=0.0, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Turn:
    """A request of the trace as the engine gets it."""

    session: str
    prompt: list[int]


@dataclasses.dataclass
class Replayed:
    """What one variant needed for all turns. `hit_tokens` are by tier."""

    seconds: float = 0.0
    ttfts_s: list[float] = dataclasses.field(default_factory=list)
    hit_tokens: Counter[str] = dataclasses.field(default_factory=Counter)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--trace", type=Path, help=f"[default: {TRACE}, if it is there]")
    parser.add_argument("--start", type=int, default=2000, help="requests of the trace that are left out before")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=32, help="tokens for a block of the trace, a multiple of 16")
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where the servers' disks are  [default: the temporary folder]")
    arguments = parse(parser, argv)
    if arguments.tokens <= 0 or arguments.tokens % _BLOCK_TOKENS:
        parser.error(f"--tokens must be a multiple of {_BLOCK_TOKENS}")
    if min(arguments.requests, arguments.start + 1, arguments.in_flight) <= 0:
        parser.error("--requests and --in-flight must be at least 1, and --start at least 0")
    path = arguments.trace or (TRACE if TRACE.exists() else None)
    requests = _chosen(path, arguments)
    if not requests:
        parser.error("no request of the trace is short enough: give fewer --tokens, or another --start")
    settings = {
        **device_settings(arguments.device, "wall"),
        "shape": arguments.model_shape,
        "trace": path.name if path else "made up",
        "start": arguments.start,
        "requests": len(requests),
        "tokens_a_block": arguments.tokens,
        "prompt_tokens": sum(len(request.hashes) for request in requests) * arguments.tokens,
        "different_tokens": len({number for request in requests for number in request.hashes}) * arguments.tokens,
        "in_flight": arguments.in_flight,
        "shares": {"device": _DEVICE_SHARE, "memory": _MEMORY_SHARE, "disk": _DISK_SHARE},
    }
    result = Result("eviction.replayed", settings)
    bars = BARS if is_h200(arguments.device) else {}
    return conclude(result, arguments, bars, lambda: _measure(arguments, requests, result))


def _measure(arguments: argparse.Namespace, requests: Sequence[TracedRequest], result: Result) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in result.settings.items() if name != "bars"))
    different_tokens, prompt_tokens = (result.settings[name] for name in ("different_tokens", "prompt_tokens"))
    assert isinstance(different_tokens, int)
    assert isinstance(prompt_tokens, int)
    found = {}
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory(prefix="kvtier-replay-", dir=arguments.folder) as folder:
            found[variant] = _replay(variant, requests, arguments, different_tokens, Path(folder))
        result.rows.append(_row(variant, found[variant], prompt_tokens))
        console.print(str(result.rows[-1]))
    result.figures = _figures(found, prompt_tokens)
    print_table("requests per second and times to the first token", result.rows)


def _chosen(path: Path | None, arguments: argparse.Namespace) -> list[TracedRequest]:
    """Requests that are short enough, without the first of them."""
    requests: Sequence[TracedRequest] = synthetic_traces()["chats"] if path is None else by_arrival(read_traces(path))
    most = _MAX_TOKENS[arguments.device] // arguments.tokens
    short = (one for one in requests[arguments.start if path else 0 :] if 0 < len(one.hashes) <= most)
    return list(itertools.islice(short, min(arguments.requests, 40) if arguments.quick else arguments.requests))


def _turns(requests: Sequence[TracedRequest], tokens: int, vocab_size: int) -> list[Turn]:
    """Tokens follow from the blocks' numbers; one more ends the prompt, since a prompt's last token is computed."""
    known: dict[int, list[int]] = {}
    turns = []
    for place, request in enumerate(requests):
        for number in request.hashes:
            if number not in known:
                known[number] = np.random.default_rng(number).integers(vocab_size, size=tokens).tolist()
        prompt = [token for number in request.hashes for token in known[number]]
        turns.append(Turn(request.session or f"alone-{place}", [*prompt, 0]))
    return turns


def _replay(
    variant: str, requests: Sequence[TracedRequest], arguments: argparse.Namespace, different_tokens: int, folder: Path
) -> Replayed:
    token_bytes = (
        kv_bytes_of(arguments.model_shape, _BLOCK_TOKENS, 2 if arguments.device == "cuda" else 4) // _BLOCK_TOKENS
    )
    all_bytes = different_tokens * token_bytes
    longest = max(len(request.hashes) for request in requests) * arguments.tokens + _NUM_OUTPUTS + 1
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "device": arguments.device,
        "dtype": "bfloat16" if arguments.device == "cuda" else "float32",
        "kv_cache_space": max(int(all_bytes * _DEVICE_SHARE), longest * token_bytes * 5 // 4),
        "max_model_len": longest + _BLOCK_TOKENS,
        "canary_share": 0.0,
    }
    with contextlib.ExitStack() as stack:
        if variant != "none":
            disk = ("--folder", str(folder), "--disk", _kib(all_bytes * _DISK_SHARE))
            memory = _kib(max(all_bytes * _MEMORY_SHARE, longest * token_bytes * 5 // 4))
            server = stack.enter_context(cache_server("--eviction", variant, *disk, memory=memory))
            settings["cache_server"] = server.unix
        model = stack.enter_context(model_folder(arguments.model_shape))
        llm = stack.enter_context(LLM(model, **settings))
        turns = _turns(requests, arguments.tokens, llm.engine.loaded.config.vocab_size)
        client = stack.enter_context(EngineClient(llm.engine))
        client.submit([1] * _BLOCK_TOKENS, _PARAMS).wait()
        found = _hand_over(client, turns, arguments.in_flight)
    gc.collect()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
    return found


def _hand_over(client: EngineClient, turns: Sequence[Turn], in_flight: int) -> Replayed:
    """In the order of the trace: a turn waits for a place, and for the turn before it in its session."""
    found = Replayed()
    last: dict[str, Future[None]] = {}
    places, lock = threading.Semaphore(in_flight), threading.Lock()

    def ask(turn: Turn) -> None:
        try:
            asked_at, ttft_s = time.perf_counter(), 0.0
            for piece in client.submit(turn.prompt, _PARAMS):
                ttft_s = ttft_s or time.perf_counter() - asked_at
                if piece.completion is not None:
                    with lock:
                        found.ttfts_s.append(ttft_s)
                        found.hit_tokens.update(piece.completion.cached_tokens)
        finally:
            places.release()

    started_at = time.perf_counter()
    with ThreadPoolExecutor(in_flight, "kvtier-turn") as threads:
        for turn in turns:
            before = last.get(turn.session)
            if before is not None:
                before.result()
            places.acquire()
            last[turn.session] = threads.submit(ask, turn)
        for future in last.values():
            future.result()
    found.seconds = time.perf_counter() - started_at
    if len(found.ttfts_s) != len(turns):
        raise RuntimeError(f"{len(turns) - len(found.ttfts_s)} requests have no answer")
    return found


def _kib(nbytes: float) -> str:
    return f"{int(nbytes) // 1024}KiB"


def _row(variant: str, found: Replayed, prompt_tokens: int) -> dict[str, object]:
    ttfts_s = sorted(found.ttfts_s)
    return {
        "eviction": variant,
        "requests/s": round(len(ttfts_s) / found.seconds, 3),
        "TTFT mean, ms": round(1000 * statistics.mean(ttfts_s), 1),
        "TTFT p50, ms": round(1000 * statistics.median(ttfts_s), 1),
        "TTFT p90, ms": round(1000 * share_of_sorted(ttfts_s, 0.9), 1),
        "hits": " ".join(f"{tier} {count / prompt_tokens:.3f}" for tier, count in sorted(found.hit_tokens.items())),
        "s": round(found.seconds, 1),
    }


def _figures(found: Mapping[str, Replayed], prompt_tokens: int) -> dict[str, float]:
    figures = {f"hits_{name}": sum(one.hit_tokens.values()) / prompt_tokens for name, one in found.items()}
    ours = found["adaptive"]
    for name in ("lru", "none"):
        figures[f"rps_over_{name}"] = found[name].seconds / ours.seconds
        figures[f"mean_ttft_over_{name}"] = statistics.mean(ours.ttfts_s) / statistics.mean(found[name].ttfts_s)
    return figures


if __name__ == "__main__":
    sys.exit(main())
